"""The official anthropic package, as it is, against the server. Any model will do."""

import json

import anthropic
import pytest

TOOL = {
    "name": "weather",
    "description": "Tells the weather of a city.",
    "input_schema": {
        "type": "object",
        "properties": {"city": {"enum": ["Rome", "Oslo"]}},
        "required": ["city"],
        "additionalProperties": False,
    },
}


@pytest.fixture(scope="module")
def client(base_url, api_key):
    return anthropic.Anthropic(base_url=base_url, api_key=api_key, max_retries=0, timeout=300)


# The package has no parameters for sampling; other clients of the API do.
GREEDY = {"temperature": 0}


def ask(client, model, text="Name a colour.", **extra):
    fields = {"max_tokens": 16, "extra_body": GREEDY, **extra}
    return client.messages.create(model=model, messages=[{"role": "user", "content": text}], **fields)


def text_of(message):
    return "".join(block.text for block in message.content if block.type == "text")


def test_models_are_listed_and_found(client):
    listed = list(client.models.list())
    assert listed and all(model.type == "model" and model.display_name for model in listed)
    assert client.models.retrieve(listed[0].id).id == listed[0].id


def test_a_stream_says_what_a_message_does(client, model):
    whole = ask(client, model, system="Be brief.")
    assert whole.role == "assistant" and whole.stop_reason in ("end_turn", "max_tokens")
    messages = [{"role": "user", "content": "Name a colour."}]
    fields = {"system": [{"type": "text", "text": "Be brief."}], "max_tokens": 16, "extra_body": GREEDY}
    with client.messages.stream(model=model, messages=messages, **fields) as stream:
        text = "".join(stream.text_stream)
        last = stream.get_final_message()
    assert text == text_of(whole) == text_of(last)
    assert last.stop_reason == whole.stop_reason
    assert last.usage.output_tokens == whole.usage.output_tokens


def test_tokens_are_counted_as_they_are_used(client, model):
    messages = [{"role": "user", "content": "Name a colour."}]
    counted = client.messages.count_tokens(model=model, messages=messages, tools=[TOOL]).input_tokens
    usage = client.messages.create(model=model, messages=messages, tools=[TOOL], max_tokens=1).usage
    assert counted == usage.input_tokens + usage.cache_read_input_tokens


def test_a_tool_goes_round(client, model):
    messages = [{"role": "user", "content": "How is the weather in Rome?"}]
    fields = {"model": model, "tools": [TOOL], "max_tokens": 200, "extra_body": GREEDY}
    first = client.messages.create(messages=messages, tool_choice={"type": "any"}, **fields)
    assert first.stop_reason == "tool_use"
    call = next(block for block in first.content if block.type == "tool_use")
    assert call.name == "weather" and call.input["city"] in ("Rome", "Oslo")
    result = {"type": "tool_result", "tool_use_id": call.id, "content": "18 degrees"}
    messages += [{"role": "assistant", "content": first.content}, {"role": "user", "content": [result]}]
    last = client.messages.create(messages=messages, tool_choice={"type": "none"}, **fields)
    assert last.stop_reason in ("end_turn", "max_tokens")


def test_a_call_is_streamed_in_pieces_that_join(client, model):
    choice = {"type": "tool", "name": "weather", "disable_parallel_tool_use": True}
    messages = [{"role": "user", "content": "Weather in Oslo?"}]
    pieces = ""
    with client.messages.stream(
        model=model, messages=messages, tools=[TOOL], tool_choice=choice, max_tokens=200
    ) as stream:
        for event in stream:
            if event.type == "content_block_delta" and event.delta.type == "input_json_delta":
                pieces += event.delta.partial_json
        last = stream.get_final_message()
    call = next(block for block in last.content if block.type == "tool_use")
    assert json.loads(pieces) == call.input and call.input["city"] in ("Rome", "Oslo")


def test_an_answer_follows_its_schema(client, model):
    schema = {"type": "object", "properties": {"sort": {"enum": ["tool", "animal"]}}, "required": ["sort"],
              "additionalProperties": False}
    config = {"format": {"type": "json_schema", "schema": schema}}
    answer = ask(client, model, output_config=config, max_tokens=200)
    assert json.loads(text_of(answer))["sort"] in ("tool", "animal")


def test_stop_sequences_and_a_full_context(client, model):
    words = [word for word in text_of(ask(client, model, max_tokens=12)).split() if len(word) > 2]
    if words:
        stopped = ask(client, model, max_tokens=12, stop_sequences=[words[-1]])
        assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", words[-1])
    # More than any context has is cut, not refused.
    messages = [{"role": "user", "content": "Hello."}]
    with client.messages.stream(model=model, messages=messages, max_tokens=10_000_000) as stream:
        next(iter(stream.text_stream), None)


def test_errors_are_the_packages_own(client, model):
    with pytest.raises(anthropic.NotFoundError) as unknown:
        ask(client, "there-is-no-such-model")
    assert unknown.value.body["error"]["type"] == "not_found_error"
    with pytest.raises(anthropic.BadRequestError) as wrong:
        ask(client, model, extra_body={"temperature": 3})
    assert wrong.value.body["error"]["type"] == "invalid_request_error" and wrong.value.request_id
    with pytest.raises(anthropic.BadRequestError):
        ask(client, model, "word " * 200_000)
    with pytest.raises(anthropic.BadRequestError):
        client.messages.create(model=model, max_tokens=5, messages=[{"role": "assistant", "content": "I"}])


def test_a_wrong_key_is_refused(asks_for_key, base_url, model):
    with pytest.raises(anthropic.AuthenticationError):
        ask(anthropic.Anthropic(base_url=base_url, api_key="wrong", max_retries=0), model)
