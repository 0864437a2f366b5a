"""Weights to begin with, taken from the target."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from eyas.base.errors import ConfigError, DataError
from eyas.drafter.batch import TrainingSample
from eyas.drafter.linear import away_from_zero, ridge
from eyas.drafter.mlpstart import STEPS, start_mlp
from eyas.drafter.model import EagleDrafter
from eyas.drafter.rows import supervised_rows
from eyas.drafter.schedule import epoch_order
from eyas.drafter.settings import TrainSettings
from eyas.drafter.source import SampleSource
from eyas.drafter.tokenpath import start_on_own_row, start_token_path
from eyas.drafter.vocabulary import DraftVocabulary

NORM_SHARE = 0.5
"""The final norm starts at this share of the target's: a drafter that knows little must not be sure."""
RIDGE = 1e-3
"""Strength of the ridge, as a share of each aux state's own mean square."""
RIDGE_ROWS = 100_000
"""Supervised rows that the fit looks at, at most."""
SIZE_ROWS = 10_000
"""Supervised rows that the sizes of aux states are measured on when there is no fit."""


def start_from_head(
    drafter: EagleDrafter, head: Tensor, norm_weight: Tensor, vocabulary: DraftVocabulary
) -> None:
    """Head rows of the draft vocabulary and the final norm (halved) from the target.

    Args:
        head: ``[V, T]`` of the target.
        norm_weight: ``[T]`` of the target's final norm.

    Raises:
        ConfigError: the drafter is not as wide as the target.
    """
    shape = drafter.shape
    if shape.hidden_size != shape.target_hidden_size:
        raise ConfigError(
            "a drafter can start from its target's head only when both are equally wide",
            where=f"drafter {shape.hidden_size}, target {shape.target_hidden_size}",
        )
    with torch.no_grad():
        rows = head[torch.from_numpy(vocabulary.target_ids).to(head.device)]
        drafter.lm_head.weight.copy_(rows)
        drafter.norm.weight.copy_(norm_weight.to(drafter.norm.weight) * NORM_SHARE)


@dataclass
class RidgeFit:
    """Streamed normal equations: from aux states, and the next token, to the target's next last state.

    The last state before the final norm's weight, ``h[t+1] / norm_weight``, has unit mean square and is
    what the drafter's own final norm and head turn into the logits of ``x[t+2]``. So ``fc`` fitted to it
    lets step 0 begin as a linear guess of the target's next state. Each aux state's column is
    penalised by its own mean square, which makes the fit blind to their very unequal scales.

    ``with_token`` fits the normed embedding of ``x[t+1]`` beside the aux states: what the layer can add
    to the feature (see `eyas.drafter.tokenpath`) is then not asked of ``fc``.
    """

    drafter: EagleDrafter
    norm_weight: Tensor
    with_token: bool = False
    num_rows: int = 0

    def __post_init__(self) -> None:
        shape, device = self.drafter.shape, self.drafter.fc.weight.device
        self._num_aux = shape.num_aux * shape.target_hidden_size
        width = self._num_aux + (shape.hidden_size if self.with_token else 0)
        self._gram = torch.zeros(width, width, dtype=torch.float64, device=device)
        self._cross = torch.zeros(width, shape.hidden_size, dtype=torch.float64, device=device)

    def add(self, sample: TrainingSample) -> None:
        """Count the rows of one sample that step 0 trains.

        Raises:
            DataError: a last state is missing.
        """
        rows = supervised_rows(sample.spans, len(sample.tokens), 0)
        if len(rows) == 0:
            return
        places = np.searchsorted(sample.last_rows, rows + 1)
        if places[-1] >= len(sample.last_rows) or (sample.last_rows[places] != rows + 1).any():
            raise DataError(
                "a captured sample lacks last states that its spans call for", where=f"sample {sample.id}"
            )
        device = self._gram.device
        inputs = self._inputs(sample.aux[torch.from_numpy(rows)].to(device))
        if self.with_token:
            following = np.asarray(sample.tokens, dtype=np.int64)[rows + 1]
            inputs = torch.cat((inputs, self._embedded(torch.from_numpy(following).to(device))), dim=1)
        outputs = sample.last[torch.from_numpy(places)].to(device=device, dtype=torch.float64)
        outputs = outputs / away_from_zero(self.norm_weight.to(device=device, dtype=torch.float64))
        finite = torch.isfinite(inputs).all(dim=1) & torch.isfinite(outputs).all(dim=1)
        inputs, outputs = inputs[finite], outputs[finite]
        self._gram.addmm_(inputs.T, inputs)
        self._cross.addmm_(inputs.T, outputs)
        self.num_rows += len(inputs)

    def _inputs(self, aux: Tensor) -> Tensor:
        shape = self.drafter.shape
        wide = aux.to(torch.float64)
        if shape.normed_feedback:
            wide = wide * torch.rsqrt(wide.pow(2).mean(dim=-1, keepdim=True) + shape.rms_norm_eps)
        return wide.flatten(1)

    def _embedded(self, tokens: Tensor) -> Tensor:
        wide = F.embedding(tokens, self.drafter.embedding).to(torch.float64)
        return wide * torch.rsqrt(wide.pow(2).mean(dim=-1, keepdim=True) + self.drafter.shape.rms_norm_eps)

    def sizes(self) -> Tensor:
        """Root mean square of each aux state ``[A T]``; ones when no row was added."""
        return self._all_sizes()[: self._num_aux]

    def _all_sizes(self) -> Tensor:
        if self.num_rows == 0:
            return torch.ones_like(self._gram.diagonal())
        return self._gram.diagonal().div(self.num_rows).sqrt()

    def solve(self) -> tuple[Tensor, Tensor | None]:
        """``[H, A T]`` weights of ``fc``, and the map ``[H, H]`` of the token when it is fitted.

        Raises:
            DataError: no supervised row was added.
        """
        if self.num_rows == 0:
            raise DataError("no supervised row to fit fc to", hint="set train.warm_start to head")
        weights = ridge(self._gram / self.num_rows, self._cross / self.num_rows, RIDGE).T
        return weights[:, : self._num_aux], weights[:, self._num_aux :] if self.with_token else None


def fit_fc(
    drafter: EagleDrafter,
    samples: Iterable[TrainingSample],
    norm_weight: Tensor,
    *,
    solve: bool = True,
    with_token: bool = False,
    max_rows: int = RIDGE_ROWS,
) -> int:
    """Measure the aux states over samples until ``max_rows`` rows, and fit ``fc``; the rows looked at.

    Args:
        solve: set ``fc`` by ridge regression; otherwise its parameters stay and only its column sizes are
            taken.
        with_token: fit the next token's own share too, and let the layer begin with it.

    Raises:
        DataError: ``fc`` is to be fitted and the samples have no supervised row.
    """
    fit = RidgeFit(drafter, norm_weight, with_token and solve)
    for sample in samples:
        fit.add(sample)
        if fit.num_rows >= max_rows:
            break
    parameter = drafter.fc.weight.detach().clone()
    drafter.fc.set_sizes(fit.sizes())
    if solve:
        weight, token_map = fit.solve()
        drafter.fc.set_plain_weight(weight)
        if token_map is not None:
            start_token_path(drafter, token_map)
    else:
        with torch.no_grad():  # random numbers that were meant for columns of size one
            drafter.fc.weight.copy_(parameter)
    return fit.num_rows


def give_first_weights(
    drafter: EagleDrafter,
    settings: TrainSettings,
    vocabulary: DraftVocabulary,
    *,
    head: Tensor,
    norm_weight: Tensor,
    samples: SampleSource,
) -> int:
    """The weights a run begins with, as ``settings.warm_start`` says; the supervised rows looked at.

    Raises:
        ConfigError: drafter and target differ in width.
        DataError: the fit found no supervised row.
    """
    drafter.initialise(settings.seed)
    start_from_head(drafter, head, norm_weight, vocabulary)
    solve = settings.warm_start != "head"
    whole_layer = settings.warm_start == "head+ridge+layer"
    if whole_layer:
        start_on_own_row(drafter, settings.seed)
    order = epoch_order(list(samples.lengths()), settings.seed, -1)
    num_rows = fit_fc(
        drafter,
        (samples.load([name])[0] for name in order),
        norm_weight,
        solve=solve,
        with_token=whole_layer,
        max_rows=RIDGE_ROWS if solve else SIZE_ROWS,
    )
    if whole_layer:
        start_mlp(
            drafter,
            (samples.load([name])[0] for name in order),
            norm_weight,
            gamma=settings.gamma,
            seed=settings.seed,
            steps=min(STEPS, settings.steps),
            max_rows=RIDGE_ROWS,
        )
    return num_rows


def start_from_weights(
    drafter: EagleDrafter,
    weights: Mapping[str, Tensor],
    norm_weight: Tensor,
    samples: SampleSource,
    seed: int,
) -> None:
    """Weights of a drafter that was trained before, to go on from.

    Args:
        weights: by their checkpoint names, as `eyas.drafter.model` has them.
        seed: decides which samples the sizes of aux states are measured on.

    Raises:
        ConfigError: a tensor is missing, unknown or of another shape.
    """
    order = epoch_order(list(samples.lengths()), seed, -1)
    drafter.initialise(seed)
    fit_fc(
        drafter,
        (samples.load([name])[0] for name in order),
        norm_weight,
        solve=False,
        max_rows=SIZE_ROWS,
    )
    try:
        drafter.load_state_dict({name: tensor.to(drafter.fc.weight) for name, tensor in weights.items()})
    except RuntimeError as error:
        raise ConfigError(
            "these weights are not those of a drafter of this shape", why=str(error).splitlines()[-1].strip()
        ) from error
