"""A folder in place of a configuration file gives an error with a remedy, whatever the folder contains."""

from __future__ import annotations

import re

import pytest

from txl_dist.artifacts import ArtifactKind
from txl_dist.cli import train


@pytest.mark.parametrize("kind", ArtifactKind)
def test_every_kind_of_folder_has_a_remedy(kind: ArtifactKind) -> None:
    assert re.search(r"`txl |--init ", train._REMEDIES[kind])
