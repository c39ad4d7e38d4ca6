"""Whole training steps of the other codes and of ours at the same sizes, with one interface: `step(ids) -> loss`.

    trainers = {"original": PeerTrainer(original(folder), sizes), "ours": OurTrainer(sizes, attention="fused")}

A step is forward, loss, backward, clipping to 0.25 and Adam. The memory is kept between steps. The other codes run as
in their train.py, with `zero_grad`, the mean of the losses and torch's default Adam. NVIDIA's code runs in fp16 under
autocast with a GradScaler, but with Adam instead of its lamb. Hugging Face's code runs like the original's. Our step
has `SegmentLoss`, torch's fused Adam, and batches as the reader thread makes them, but on the training thread. In half
precision it keeps fp32 masters as ZeRO does. Distribution is not measured here (see engine.py).
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple, Protocol, cast

import numpy as np
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor, nn

from tools.benchmarks.peers import Peer
from txl_dist.config.load import Config
from txl_dist.config.schema import AttentionKernel, ModelSection
from txl_dist.convert.huggingface import export_huggingface
from txl_dist.convert.import_checks import Imported
from txl_dist.convert.original import OriginalSettings, model_of
from txl_dist.convert.vocabulary import identity_tokenizer
from txl_dist.data.loader.stream import plain_segment
from txl_dist.inference.bundle import DTYPES, Package, copy_weights
from txl_dist.model.flops import has_projections
from txl_dist.model.transformer_xl import Batch, SegmentLoss, TransformerXL
from txl_dist.train.batch import batch_maker, pinned, to_device
from txl_dist.train.engine.cuda_graph import GraphedModule, record_on_gpu

CLIP_NORM, LEARNING_RATE = 0.25, 2.5e-4


class Sizes(NamedTuple):
    """Sizes that all variants of a benchmark share."""

    model: ModelSection
    vocab_size: int
    num_lanes: int
    segment_len: int
    memory_len: int

    @classmethod
    def of(cls, config: Config, *, vocab_size: int, num_lanes: int) -> Sizes:
        """Return the sizes of a recipe, with the number of lanes (batch rows) that one device runs."""
        return cls(config.model, vocab_size, num_lanes, config.train.segment_len, config.train.memory_len)

    @property
    def tokens(self) -> int:
        """Number of tokens in a step."""
        return self.num_lanes * self.segment_len


class Trainer(Protocol):
    """Interface of a code that trains one segment at a time."""

    def step(self, ids: np.ndarray) -> Tensor:
        """Make one step on ids [lanes, T + 1]. Return the mean loss in nats on the device, without waiting for it."""


def zipf_segments(sizes: Sizes, *, seed: int = 0) -> Iterator[np.ndarray]:
    """Yield ids [lanes, T + 1] without end. The frequency of an id is proportional to its rank to the power -1.2, as
    for words."""
    generator = np.random.default_rng(seed)
    weights = np.arange(1, sizes.vocab_size + 1) ** -1.2
    last = generator.choice(sizes.vocab_size, (sizes.num_lanes, 1), p=weights / weights.sum())
    while True:
        new = generator.choice(sizes.vocab_size, (sizes.num_lanes, sizes.segment_len), p=weights / weights.sum())
        yield np.concatenate([last, new], axis=1)
        last = new[:, -1:]


class PeerTrainer:
    """The original's code, or NVIDIA's with `nvidia`. `half` is autocast to fp16 with loss scaling. `fused` uses
    torch's fused Adam, as ours does, instead of the default Adam of their train.py."""

    def __init__(
        self,
        peer: Peer,
        sizes: Sizes,
        *,
        device: str = "cpu",
        nvidia: bool = False,
        half: bool = False,
        fused: bool = False,
    ) -> None:
        self.sizes, self.device, self.nvidia, self.half = sizes, device, nvidia, half
        torch.manual_seed(0)
        arguments = peer_arguments(sizes)
        if nvidia:
            arguments["dtype"] = None
            if not has_projections(sizes.model):  # their code reads the entries that are not tied
                arguments["tie_projs"] = [True] * len(arguments["tie_projs"])
        self.model = peer.model.MemTransformerLM(**arguments)
        _initialize(self.model, sizes.model)
        self.model.to(device).train()
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=LEARNING_RATE, fused=fused)
        self.scaler = torch.amp.GradScaler(device) if half else None
        self.memory: Any = None if nvidia else ()

    def step(self, ids: np.ndarray) -> Tensor:
        """See `Trainer`."""
        ids_ST = torch.from_numpy(np.ascontiguousarray(ids.T)).to(self.device, non_blocking=True)
        self.model.zero_grad()
        with torch.autocast(self.device, torch.float16, enabled=self.half):
            if self.nvidia:
                losses, self.memory = self.model(ids_ST[:-1], ids_ST[1:], self.memory)
            else:
                losses, *self.memory = self.model(ids_ST[:-1], ids_ST[1:], *self.memory)
            loss = losses.float().mean().type_as(losses)
        if self.scaler is None:
            loss.backward()
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), CLIP_NORM)
            self.optimizer.step()
        else:
            self.scaler.scale(loss).backward()
            self.scaler.unscale_(self.optimizer)
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), CLIP_NORM)
            self.scaler.step(self.optimizer)
            self.scaler.update()
        detached: Tensor = loss.detach()
        return detached

    def begin_as(self, theirs: PeerTrainer) -> PeerTrainer:
        """Load the weights of the original's model. NVIDIA's code has other names for the softmax."""
        weights = {
            name.replace("crit.out_layers.0.bias", "crit.out_layers_biases.0"): value
            for name, value in theirs.model.state_dict().items()
        }
        missing, _ = self.model.load_state_dict(weights, strict=False)
        assert all("out_layers_weights" in name or "shared_out_projs" in name for name in missing), missing
        return self

    def imported(self) -> Imported:
        """Return the current weights in the form in which `txl import` reads them."""
        return model_of(
            {name: value.clone() for name, value in self.model.state_dict().items() if "inv_freq" not in name},
            OriginalSettings.of({}, settings_told(self.sizes), where="the benchmark"),
            same_length="memory",
            ties_are_listed=not self.nvidia,
            where="the benchmark",
        )


class HuggingFaceTrainer:
    """Hugging Face's TransfoXL in fp32 with our exported weights. They are the given weights, or those that
    `OurTrainer` draws.

    The library's forward pass with labels trains on T - 1 of T targets. So the trainer calls its two parts one after
    the other and gives the second part one more position, which it drops. The trainer then trains on all T targets, as
    the other trainers do.
    """

    def __init__(
        self, peer: Peer, sizes: Sizes, *, device: str = "cpu", weights: dict[str, Tensor] | None = None
    ) -> None:
        self.device = device
        ours = OurTrainer(sizes, attention="plain", weights=weights).model
        with tempfile.TemporaryDirectory() as folder:
            package = Package(
                section=sizes.model,
                weights=ours.state_dict(),
                tokenizer=identity_tokenizer(sizes.vocab_size),
                segment_len=sizes.segment_len,
                memory_len=sizes.memory_len,
                source={},
                probe={},
            )
            export_huggingface(Path(folder), package)
            exported = load_file(Path(folder, "model.safetensors"))
            config = peer.model.TransfoXLConfig.from_pretrained(folder, local_files_only=True)
        # The model's own `from_pretrained` would give every layer its own biases instead of the shared biases.
        self.model: Any = peer.model.TransfoXLLMHeadModel(config)
        missing, left_over = self.model.load_state_dict(exported, strict=False)
        assert not left_over, left_over
        assert all(name.startswith("crit.out_") for name in missing), missing  # tied
        self.model.to(device).train()
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=LEARNING_RATE)
        # Without a memory the model would attend to zeros in the first segment.
        nothing = torch.zeros(0, sizes.num_lanes, sizes.model.width, device=device)
        self.memory = [nothing] * sizes.model.num_layers

    def step(self, ids: np.ndarray) -> Tensor:
        """See `Trainer`."""
        ids_BS = torch.from_numpy(ids).to(self.device, non_blocking=True)
        self.model.zero_grad()
        output = self.model.transformer(ids_BS[:, :-1], mems=self.memory)
        self.memory = output.mems
        loss: Tensor = self.model.crit(F.pad(output.last_hidden_state, (0, 0, 0, 1)), ids_BS).mean()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), CLIP_NORM)
        self.optimizer.step()
        return loss.detach()


class OurTrainer:
    """This project's model and loss. `graphed` replays forward and backward as CUDA graphs (not in fp16)."""

    def __init__(
        self,
        sizes: Sizes,
        *,
        attention: AttentionKernel,
        device: str = "cpu",
        precision: str = "fp32",
        weights: dict[str, Tensor] | None = None,
        graphed: bool = False,
    ) -> None:
        torch.manual_seed(0)
        self.device, dtype = torch.device(device), DTYPES[precision]
        model = TransformerXL(sizes.model, vocab_size=sizes.vocab_size, attention=attention, keeps_scores=True)
        self.model = model.to(self.device)
        if weights is not None:
            with torch.no_grad():
                copy_weights(self.model, weights)
        self.parameters = list(self.model.parameters())
        halves = self.parameters if precision != "fp32" else []
        self.masters = [nn.Parameter(parameter.detach().float().clone()) for parameter in halves]
        self.loss_of: nn.Module = SegmentLoss(self.model.to(dtype)).train()
        self.maker = batch_maker(self.model, mask_documents=False, for_graphs=graphed)
        self.optimizer = torch.optim.Adam(self.masters or self.parameters, lr=LEARNING_RATE, fused=True)
        self.scaler = torch.amp.GradScaler(device, enabled=precision == "fp16")
        self.memory = self.model.empty_memory(num_lanes=sizes.num_lanes, memory_len=sizes.memory_len)
        if graphed:
            record = record_on_gpu if self.device.type == "cuda" else _run_again
            self.loss_of = GraphedModule(self.loss_of, scale=lambda: 1.0, record=record)

    def step(self, ids: np.ndarray) -> Tensor:
        """See `Trainer`."""
        batch = to_device(pinned(self.maker.batch(plain_segment(ids)), self.device), self.device)
        loss = self._forward_backward(batch)
        owners = self.masters or self.parameters
        if self.masters:
            for master in self.masters:
                master.grad = torch.empty_like(master) if master.grad is None else master.grad
            theirs = [cast(Tensor, parameter.grad) for parameter in self.parameters]
            torch._foreach_copy_([cast(Tensor, master.grad) for master in self.masters], theirs)
        self.scaler.unscale_(self.optimizer)
        torch.nn.utils.clip_grad_norm_(owners, CLIP_NORM)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        if self.masters:
            with torch.no_grad():
                torch._foreach_copy_([*self.parameters], [*self.masters])
        self.model.zero_grad(set_to_none=True)
        return loss

    def _forward_backward(self, batch: Batch) -> Tensor:
        loss: Tensor
        loss, self.memory = self.loss_of(batch, self.memory, float(batch.tokens_BT.numel()))
        self.scaler.scale(loss).backward()
        return loss.detach()


def _run_again(run: Callable[[], Any]) -> Callable[[], Any]:
    """Replace a CUDA graph by running the function again, for rehearsals on a CPU."""
    run()
    return run


def settings_told(sizes: Sizes) -> dict[str, Any]:
    """Return the settings that weights alone do not contain, by the other codes' names."""
    return {
        "n_head": sizes.model.num_heads,
        "d_head": sizes.model.head_width,
        "cutoffs": list(sizes.model.cutoffs),
        "n_token": sizes.vocab_size,
        "tie_weight": True,
        "same_length": sizes.model.same_length != "off",
        "clamp_len": sizes.model.clamp_len or -1,
        "dropout": sizes.model.dropout,
        "dropatt": sizes.model.attention_dropout,
    }


def peer_arguments(sizes: Sizes) -> dict[str, Any]:
    """Return the arguments of MemTransformerLM, the model class of the original and of NVIDIA."""
    model, num_clusters = sizes.model, len(sizes.model.cutoffs) + 1
    return {
        "n_token": sizes.vocab_size,
        "n_layer": model.num_layers,
        "n_head": model.num_heads,
        "d_model": model.width,
        "d_head": model.head_width,
        "d_inner": model.ff_width,
        "dropout": model.dropout,
        "dropatt": model.attention_dropout,
        "tie_weight": model.tie_weights,
        "d_embed": model.embed_width_or_default(),
        "div_val": model.div_value,
        "tie_projs": list(model.tie_projections) or [False] * num_clusters,
        "pre_lnorm": model.pre_norm,
        "tgt_len": sizes.segment_len,
        "ext_len": 0,
        "mem_len": sizes.memory_len,
        "cutoffs": list(model.cutoffs),
        "same_length": model.same_length != "off",
        "attn_type": 0,
        "clamp_len": model.clamp_len or -1,
    }


def _initialize(module: nn.Module, model: ModelSection) -> None:
    """Initialize weights as the other codes' train.py: normal weights, zero biases, and norms near one."""
    for name, parameter in module.named_parameters():
        if parameter.dim() > 1:
            nn.init.normal_(parameter, 0.0, model.init_std if "proj" not in name else model.projection_init_std)
        elif "norm" in name and name.endswith("weight"):
            nn.init.normal_(parameter, 1.0, model.init_std)
        else:
            nn.init.zeros_(parameter)
