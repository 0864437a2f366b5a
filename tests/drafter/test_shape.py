from __future__ import annotations

import json

import pytest

from eyas.base.errors import ConfigError
from eyas.drafter.shape import DrafterShape
from tests.drafter.cases import make_shape


def test_through_json_and_back():
    shape = make_shape("eagle3.1", rope_scaling={"rope_type": "linear", "factor": 2.0})
    assert DrafterShape.from_dict(json.loads(json.dumps(shape.as_dict()))) == shape


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_kv_heads": 3}, "share"),
        ({"head_dim": 5}, "odd"),
        ({"draft_vocab_size": 24}, "larger"),
        ({"num_aux": 0}, "num_aux"),
        ({"norms": "eagle2"}, "eagle3"),
    ],
)
def test_impossible_shapes(changes, message):
    with pytest.raises(ConfigError, match=message):
        make_shape(**changes)


def test_unknown_and_missing_keys():
    values = make_shape().as_dict()
    with pytest.raises(ConfigError, match="colour"):
        DrafterShape.from_dict({**values, "colour": 1})
    del values["num_aux"]
    with pytest.raises(ConfigError, match="incomplete"):
        DrafterShape.from_dict(values)
