"""Ollama's own package, and Prometheus' own parser, against the server."""

import urllib.request

import ollama
import pytest
from prometheus_client.parser import text_string_to_metric_families


@pytest.fixture(scope="module")
def client(base_url, api_key):
    return ollama.Client(host=base_url, headers={"authorization": f"Bearer {api_key}"})


def test_models_are_listed_and_shown(client):
    listed = client.list().models
    assert listed and listed[0].size > 0
    assert "completion" in client.show(listed[0].model).capabilities


def test_a_stream_says_what_a_whole_answer_does(client):
    fields = {
        "model": client.list().models[0].model,
        "messages": [{"role": "user", "content": "Name a colour."}],
        "options": {"num_predict": 12, "temperature": 0},
    }
    whole = client.chat(**fields)
    text = ""
    for piece in client.chat(stream=True, **fields):
        text += piece.message.content or ""
        last = piece
    assert text == whole.message.content
    assert last.done and last.eval_count == whole.eval_count and last.total_duration > 0


def test_errors_are_the_packages_own(client):
    with pytest.raises(ollama.ResponseError) as unknown:
        client.chat("there-is-no-such-model", messages=[{"role": "user", "content": "x"}])
    assert unknown.value.status_code == 404


def test_prometheus_reads_the_metrics(base_url):
    with urllib.request.urlopen(f"{base_url}/metrics") as page:
        families = {family.name: family for family in text_string_to_metric_families(page.read().decode())}
    assert families["smoe_requests"].type == "counter"
    assert families["smoe_time_to_first_token_seconds"].type == "histogram"
