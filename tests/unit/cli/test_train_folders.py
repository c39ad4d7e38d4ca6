"""A folder in the place of a configuration file gets a remedy, whatever it holds."""

from __future__ import annotations

import re

import pytest

from txl_dist.artifacts import ArtifactKind
from txl_dist.cli import train


@pytest.mark.parametrize("kind", ArtifactKind)
def test_every_kind_of_folder_has_a_remedy(kind: ArtifactKind) -> None:
    assert re.search(r"`txl |--init ", train._REMEDIES[kind])
