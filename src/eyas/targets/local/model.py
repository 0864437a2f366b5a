"""A target that runs in this process through transformers."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors import SafetensorError
from transformers.utils import logging as hf_logging

from eyas.base.errors import TargetError
from eyas.config.target_facts import TargetFacts, read_target_facts
from eyas.targets.capture import CapturedStates
from eyas.targets.dtype import torch_dtype
from eyas.targets.local import attention
from eyas.targets.local.session import DecodeSession, RaggedSession, RecomputeSession, ragged_fault
from eyas.targets.local.structure import find_structure
from eyas.targets.local.taps import tapped
from eyas.targets.parts import HeadRule, read_head_rule
from eyas.targets.weight_files import weight_files


class LocalTarget:
    """A causal language model, its sizes, and the two things asked of it: states and next tokens.

    Attributes:
        facts: sizes from the configuration.
        device: where it runs.
        dtype: its arithmetic.
    """

    any_layer = True

    def __init__(self, model: Any, facts: TargetFacts, head_rule: HeadRule | None = None) -> None:
        self.model = model.eval()
        self.facts = facts
        self.structure = find_structure(model, facts.num_layers)
        self.head_rule = head_rule or HeadRule()
        weight = next(self.structure.decoder.parameters())
        self.device, self.dtype = weight.device, weight.dtype
        self._ragged_fault: str | None = None
        self._probed = False

    @classmethod
    def load(
        cls, model_dir: Path, device: str = "cpu", dtype: str = "float32", *, trust_remote_code: bool = False
    ) -> LocalTarget:
        """Load a model folder; nothing is fetched from anywhere.

        Args:
            model_dir: folder with config.json and safetensors.
            device: a torch device; see `eyas.targets.dtype.resolve_device` for ``auto``.
            dtype: a name such as ``bfloat16``; see `eyas.targets.dtype.resolve_dtype` for ``auto``.
            trust_remote_code: run model code that lies in the folder.

        Raises:
            TargetError: files are missing, or transformers cannot load the model.
        """
        facts = read_target_facts(model_dir)
        weight_files(model_dir)
        model = _load_model(model_dir, device, torch_dtype(dtype), trust_remote_code)
        return cls(model, facts, read_head_rule(model_dir))

    @torch.no_grad()
    def capture(
        self,
        batch: Sequence[Sequence[int]],
        aux_layers: Sequence[int],
        *,
        store_dtype: torch.dtype | None = None,
    ) -> list[CapturedStates]:
        """States of every token of a batch of sequences.

        The batch is padded on the right and needs no mask: a causal model's earlier rows cannot see
        the padding. The head is not computed.

        Args:
            batch: token ids of each sequence; none is empty.
            aux_layers: layer ids in the "after k decoder layers" sense.
            store_dtype: dtype of the result; the target's own if None.

        Raises:
            TargetError: a token or layer id does not exist.
        """
        lengths = [len(tokens) for tokens in batch]
        ids = self.padded(batch)
        valid = torch.cat([torch.arange(n) + row * ids.shape[1] for row, n in enumerate(lengths)])
        gather = None if len(valid) == ids.numel() else valid.to(self.device)
        dtype = store_dtype or self.dtype
        shape = (len(valid), len(aux_layers), self.facts.hidden_size)
        aux = torch.empty(shape, dtype=dtype, device=self.device)

        def take(slot: int, residual: torch.Tensor) -> None:
            flat = residual.flatten(0, 1)
            aux[:, slot] = flat if gather is None else flat.index_select(0, gather)

        with tapped(self.structure.layers, aux_layers, take):
            states = self.states(ids).flatten(0, 1)
        last = (states if gather is None else states.index_select(0, gather)).to(dtype)
        aux_rows, last_rows = torch.split(aux.cpu(), lengths), torch.split(last.cpu(), lengths)
        return [CapturedStates(a, h) for a, h in zip(aux_rows, last_rows, strict=True)]

    def states(self, ids: torch.Tensor, **arguments: Any) -> torch.Tensor:
        """States after the final norm, [B, T, H], of token ids [B, T]; no cache unless one is given."""
        arguments = {"use_cache": False} | arguments
        output = self.structure.decoder(input_ids=ids, **arguments)
        states: torch.Tensor = output[0]
        return states

    def logits(self, states: torch.Tensor) -> torch.Tensor:
        """Logits over the vocabulary, [..., V], of states after the final norm."""
        return self.head_rule.apply(self.structure.head(states))

    def padded(self, batch: Sequence[Sequence[int]]) -> torch.Tensor:
        """Token ids as one tensor [B, longest] on the device, padded on the right with zeros.

        Raises:
            TargetError: a sequence is empty or a token id is outside the vocabulary.
        """
        lengths = [len(tokens) for tokens in batch]
        if not lengths or min(lengths) == 0:
            raise TargetError("a sequence without tokens cannot be run through the target")
        flat = torch.tensor(list(itertools.chain.from_iterable(batch)), dtype=torch.long)
        lowest, highest = int(flat.min()), int(flat.max())
        if lowest < 0 or highest >= self.facts.vocab_size:
            raise TargetError(
                f"token id {lowest if lowest < 0 else highest} is not in the target's vocabulary",
                why=f"ids go from 0 to {self.facts.vocab_size - 1}",
            )
        ids = torch.zeros((len(lengths), max(lengths)), dtype=torch.long)
        mask = torch.arange(max(lengths))[None, :] < torch.tensor(lengths)[:, None]
        ids[mask] = flat
        return ids.to(self.device)

    def session(self, batch_size: int) -> DecodeSession:
        """A decoding session for ``batch_size`` rows, all empty.

        Sessions keep keys and values where the model's layers allow to roll back; otherwise
        (recurrent layers, own cache code) each pass runs the whole prefix again, with equal results.

        Raises:
            TargetError: the model's logits are not a known function of its last states.
        """
        if self.ragged_fault is None:
            return RaggedSession(self, batch_size)
        return RecomputeSession(self, batch_size)

    @property
    def ragged_fault(self) -> str | None:
        """Why sessions run the whole prefix at every pass; None when they keep keys and values.

        Raises:
            TargetError: the model's logits are not a known function of its last states.
        """
        if not self._probed:
            self._check_head()
            self._ragged_fault = ragged_fault(self)
            self._probed = True
        return self._ragged_fault

    @torch.no_grad()
    def _check_head(self) -> None:
        ids = torch.arange(1, 5, device=self.device)[None] % self.facts.vocab_size
        expected = self.model(input_ids=ids, use_cache=False).logits.float()
        found = self.logits(self.states(ids)).float()
        tolerance = 1e-3 if self.dtype in (torch.float32, torch.float64) else 5e-2
        if not (found - expected).norm() <= tolerance * expected.norm():
            raise TargetError(
                "the target's logits are not its head applied to the states after its final norm",
                why=f"{type(self.model).__name__} does more than a factor or a soft cap",
            )


def _load_model(model_dir: Path, device: str, dtype: torch.dtype, trust_remote_code: bool) -> Any:
    common: dict[str, Any] = {
        "dtype": dtype,
        "trust_remote_code": trust_remote_code,
        "local_files_only": True,
        "use_safetensors": True,
    }
    if dtype == torch.float64:
        common["experts_implementation"] = "eager"  # torch's grouped products of experts have no float64
    if torch.device(device).type != "cpu":
        common["device_map"] = {"": device}
    progress = hf_logging.is_progress_bar_enabled()
    hf_logging.disable_progress_bar()  # what is shown is not decided here
    try:
        config = transformers.AutoConfig.from_pretrained(
            model_dir, trust_remote_code=trust_remote_code, local_files_only=True
        )
        auto = _auto_class(config)
        try:
            return auto.from_pretrained(model_dir, attn_implementation=attention.NAME, **common)
        except (ValueError, KeyError, ImportError):  # code that takes no attention but its own
            return auto.from_pretrained(model_dir, **common)
    except (
        OSError,
        ValueError,
        KeyError,
        ImportError,
        RuntimeError,
        AttributeError,
        SafetensorError,
    ) as error:
        raise TargetError(
            "transformers cannot load the target",
            where=model_dir,
            why=(str(error).strip().splitlines() or [type(error).__name__])[0],
        ) from error
    finally:
        if progress:
            hf_logging.enable_progress_bar()


def _auto_class(config: Any) -> Any:
    """The loader for a configuration: of language models, or of models with pictures around one."""
    remote = getattr(config, "auto_map", None) or {}
    for name in ("AutoModelForCausalLM", "AutoModelForImageTextToText"):
        auto = getattr(transformers, name)
        if name in remote or type(config) in auto._model_mapping:
            return auto
    return transformers.AutoModelForCausalLM
