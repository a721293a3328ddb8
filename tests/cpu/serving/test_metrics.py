"""What the server counts, under its own names and under vLLM's, and the dashboard that shows it."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families
from test_responses import Scripted
from test_serve_faults import app_of, posted

from upshift.serving.metrics import Metrics

DASHBOARD = Path(__file__).parents[3] / "examples" / "grafana.json"
BODY = {"model": "m", "prompt": "x"}
PARTS = ({"text": "so", "cached_tokens": 1}, {"text": " be it", "cached_tokens": 1, "ending": "length"})
SELECTED = re.compile(r"((?:vllm:|upshift_)\w+)(?:{(\w+)=)?")
GROUPED = re.compile(r"by \(([^)]*)\)")


def samples_of(metrics: Metrics) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    families = text_string_to_metric_families(metrics.render().decode())
    return {(sample.name, tuple(sorted(sample.labels.items()))): sample.value for family in families for sample in family.samples}


def counted(*scripts: Any) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    """The metrics after one request for each of the scripts."""
    engine = Scripted()
    app, metrics = app_of(engine)
    for parts in scripts:
        engine.parts = parts
        posted(app, BODY)
    metrics.record_sequences("m", live=2, waiting=1)
    metrics.resident.labels("m").set(5)
    metrics.restarts.labels("m").inc()
    return samples_of(metrics)


def test_vllms_names_have_the_figures_of_ours() -> None:
    found = counted(PARTS, PARTS)
    model = (("model_name", "m"),)
    expected: dict[str, float] = {
        "vllm:prompt_tokens_total": 6, "vllm:generation_tokens_total": 8, "vllm:prefix_cache_queries_total": 6,
        "vllm:prefix_cache_hits_total": 2, "vllm:num_requests_running": 2, "vllm:num_requests_waiting": 1,
        "vllm:time_to_first_token_seconds_count": 2, "vllm:e2e_request_latency_seconds_count": 2,
        "vllm:request_time_per_output_token_seconds_count": 2, "vllm:request_prompt_tokens_sum": 6,
        "vllm:request_generation_tokens_sum": 8,
    }  # fmt: skip
    assert {name: found[name, model] for name in expected} == expected
    assert found["vllm:request_success_total", (("finished_reason", "length"), *model)] == 2
    for ours, theirs in (("first_token", "time_to_first_token"), ("token", "request_time_per_output_token")):
        own = found[f"upshift_{ours}_seconds_sum", (("model", "m"),)]
        assert own == found[f"vllm:{theirs}_seconds_sum", model] and own > 0
    assert found["upshift_tokens_total", (("kind", "cached"), ("model", "m"))] == 2


@pytest.mark.parametrize(("failure", "aborted"), [((ValueError("x"),), 0), (({"text": "so"}, ValueError("x")), 1)])
def test_a_text_without_an_end_is_aborted(failure: Any, aborted: int) -> None:
    """Only if it has begun: a rejected request is no text."""
    found = counted(failure)
    name = "vllm:request_success_total"
    assert sum(value for (other, _), value in found.items() if other == name) == aborted


def test_the_dashboard_shows_what_the_server_counts() -> None:
    """Every metric and every label in it is there after one request."""
    dashboard = json.loads(DASHBOARD.read_text(encoding="utf-8"))
    queries = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    queries.append(dashboard["templating"]["list"][1]["query"]["query"].replace(", model_name)", '{model_name="m"}'))
    labels: dict[str, set[str]] = {}
    for name, pairs in counted(PARTS):
        labels.setdefault(name, set()).update(label for label, _ in pairs)
    assert len(queries) > 12
    for query in queries:
        selected = SELECTED.findall(query)
        assert selected, query
        groups = [label.strip() for group in GROUPED.findall(query) for label in group.split(",")]
        for name, label in selected:
            assert name in labels and {*groups, *filter(None, [label])} <= labels[name], (name, query)
    assert all(panel["title"] and panel["description"] for panel in dashboard["panels"])
