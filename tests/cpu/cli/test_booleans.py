"""One text stands for one truth value everywhere, in upper and in lower case."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from upshift.errors import RequestError
from upshift.planning.optimizers import read_optim_args
from upshift.planning.search.space import fixed_value
from upshift.training.hf_trainer.arguments import check_fixed
from upshift.training.hf_trainer.choose_plan import whole_batch_fields
from upshift.training.neftune import fixed_for_neftune
from upshift.value import read_boolean


@pytest.mark.parametrize("text", ["true", "TRUE", "True", "yes", "on", "1", "y", "t"])
def test_every_reader_knows_the_texts_for_true(text: str) -> None:
    assert read_boolean(text) is True
    assert fixed_value((f"packing={text}",), "packing") is True
    assert read_optim_args("sgd", f"nesterov={text}")["nesterov"] is True
    with pytest.raises(RequestError, match=f"packing={text} is set"):
        fixed_for_neftune((f"packing={text}",))
    with pytest.raises(RequestError, match=f"packing={text} is not possible: .*; use packing=False"):
        whole_batch_fields((f"packing={text}",), num_rows=2, accumulation=1, own_step=False, reason="of the test")
    with pytest.raises(RequestError, match="needs a CUDA device"):
        check_fixed((f"activation_offload={text}",), SimpleNamespace(), device="cpu", optimizer_given=False)


@pytest.mark.parametrize("text", ["false", "FALSE", "False", "no", "Off", "0", "N", "f"])
def test_every_reader_knows_the_texts_for_false(text: str) -> None:
    assert read_boolean(text) is False
    assignments = (f"packing={text}", "per_device_train_batch_size=02")
    assert fixed_value(assignments, "packing") is False
    assert read_optim_args("sgd", f"nesterov={text}")["nesterov"] is False
    assert set(assignments) <= set(fixed_for_neftune(assignments))
    complete = whole_batch_fields(assignments, num_rows=2, accumulation=1, own_step=False, reason="of the test")
    assert {"packing=False", "per_device_train_batch_size=2"} <= set(complete)
    check_fixed((f"activation_offload={text}",), SimpleNamespace(), device="cpu", optimizer_given=False)


@pytest.mark.parametrize("text", ["maybe", "", "2", "None"])
def test_other_texts_are_refused(text: str) -> None:
    with pytest.raises(ValueError):
        read_boolean(text)
    with pytest.raises(RequestError, match="packing"):
        fixed_value((f"packing={text}",), "packing")
    with pytest.raises(RequestError, match="nesterov"):
        read_optim_args("sgd", f"nesterov={text}")
