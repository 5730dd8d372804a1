"""The official openai package, as it is, against the server. Any model will do."""

import json
from typing import Literal

import openai
import pydantic
import pytest

TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Tells the weather of a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"enum": ["Rome", "Oslo"]}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}
SCHEMA = {
    "type": "object",
    "properties": {
        "legs": {"type": "integer", "minimum": 0, "maximum": 9},
        "sort": {"enum": ["tool", "animal"]},
    },
    "required": ["legs", "sort"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def client(base_url, api_key):
    return openai.OpenAI(base_url=f"{base_url}/v1", api_key=api_key, max_retries=0, timeout=300)


def ask(client, model, text="Name a colour.", **extra):
    fields = {"max_tokens": 16, "temperature": 0, **extra}
    return client.chat.completions.create(model=model, messages=[{"role": "user", "content": text}], **fields)


def test_models_are_listed_and_found(client):
    listed = list(client.models.list())
    assert listed and all(model.object == "model" for model in listed)
    assert client.models.retrieve(listed[0].id).id == listed[0].id


def test_a_stream_says_what_a_whole_answer_does(client, model):
    whole = ask(client, model)
    choice = whole.choices[0]
    assert choice.finish_reason in ("stop", "length") and choice.message.role == "assistant"
    assert whole.usage.total_tokens == whole.usage.prompt_tokens + whole.usage.completion_tokens
    text, reasons, usage = "", [], None
    for chunk in ask(client, model, stream=True, stream_options={"include_usage": True}):
        usage = chunk.usage or usage
        for part in chunk.choices:
            text += part.delta.content or ""
            reasons += [part.finish_reason] if part.finish_reason else []
    assert text == (choice.message.content or "")
    assert reasons == [choice.finish_reason]
    assert usage.completion_tokens == whole.usage.completion_tokens


def test_a_repeated_prompt_is_cached(client, model):
    text = "Count to twenty, and say after each number whether it is odd. " * 12
    ask(client, model, text)
    again = ask(client, model, text)
    assert 0 < again.usage.prompt_tokens_details.cached_tokens < again.usage.prompt_tokens


def test_a_tool_goes_round(client, model):
    messages = [{"role": "user", "content": "How is the weather in Rome?"}]
    fields = {"model": model, "tools": [TOOL], "temperature": 0, "max_tokens": 200}
    first = client.chat.completions.create(messages=messages, tool_choice="required", **fields)
    assert first.choices[0].finish_reason == "tool_calls"
    call = first.choices[0].message.tool_calls[0]
    assert call.function.name == "weather"
    assert json.loads(call.function.arguments)["city"] in ("Rome", "Oslo")
    messages.append(first.choices[0].message.model_dump(exclude_none=True))
    messages.append({"role": "tool", "tool_call_id": call.id, "content": "18 degrees"})
    last = client.chat.completions.create(messages=messages, tool_choice="none", **fields)
    assert not last.choices[0].message.tool_calls


def test_a_call_is_streamed_in_pieces_that_join(client, model):
    choice = {"type": "function", "function": {"name": "weather"}}
    stream = ask(client, model, tools=[TOOL], tool_choice=choice, max_tokens=200, stream=True)
    name, arguments, reason = None, "", None
    for chunk in stream:
        for part in chunk.choices:
            reason = part.finish_reason or reason
            for call in part.delta.tool_calls or []:
                name = call.function.name or name
                arguments += call.function.arguments or ""
    assert (name, reason) == ("weather", "tool_calls")
    assert json.loads(arguments)["city"] in ("Rome", "Oslo")


class Thing(pydantic.BaseModel):
    sort: Literal["tool", "animal"]


def test_the_stream_helper_follows(client, model):
    messages = [{"role": "user", "content": "Is a spider a tool or an animal?"}]
    fields = {"model": model, "messages": messages, "response_format": Thing, "max_tokens": 200}
    with client.chat.completions.stream(**fields) as stream:
        kinds = {event.type for event in stream}
        thing = stream.get_final_completion().choices[0].message.parsed
    assert "content.delta" in kinds and thing.sort in ("tool", "animal")


def test_an_answer_follows_its_schema(client, model):
    schema = {"type": "json_schema", "json_schema": {"name": "thing", "schema": SCHEMA, "strict": True}}
    answer = ask(client, model, "Is a spider a tool or an animal?", response_format=schema, max_tokens=200)
    thing = json.loads(answer.choices[0].message.content)
    assert thing["sort"] in ("tool", "animal") and 0 <= thing["legs"] <= 9
    answer = ask(client, model, response_format={"type": "json_object"}, max_tokens=400)
    if answer.choices[0].finish_reason == "stop":
        assert isinstance(json.loads(answer.choices[0].message.content), dict)


def test_log_probabilities_are_those_of_the_text(client, model):
    answer = ask(client, model, logprobs=True, top_logprobs=3)
    told = answer.choices[0].logprobs.content
    assert "".join(token.token for token in told).strip() == (answer.choices[0].message.content or "").strip()
    for token in told:
        assert token.logprob <= 0 and len(token.top_logprobs) == 3
        assert token.top_logprobs[0].logprob >= token.top_logprobs[-1].logprob


def test_stop_strings_and_choices(client, model):
    whole = ask(client, model, max_tokens=12).choices[0].message.content or ""
    words = [word for word in whole.split() if len(word) > 2]
    if words:
        stopped = ask(client, model, max_tokens=12, stop=[words[-1]])
        assert words[-1] not in (stopped.choices[0].message.content or "")
        assert stopped.choices[0].finish_reason == "stop"
    several = ask(client, model, n=3, temperature=1, seed=7)
    assert [choice.index for choice in several.choices] == [0, 1, 2]
    again = ask(client, model, n=3, temperature=1, seed=7)
    assert [c.message.content for c in several.choices] == [c.message.content for c in again.choices]


def test_a_text_is_continued(client, model):
    fields = {"max_tokens": 8, "echo": True, "temperature": 0}
    answer = client.completions.create(model=model, prompt="One, two,", **fields)
    assert answer.object == "text_completion" and answer.choices[0].text.startswith("One, two,")


def test_errors_are_the_packages_own(client, model, base_url):
    with pytest.raises(openai.NotFoundError) as unknown:
        ask(client, "there-is-no-such-model")
    assert unknown.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as wrong:
        ask(client, model, temperature=3)
    assert wrong.value.param == "temperature"
    with pytest.raises(openai.BadRequestError) as long:
        ask(client, model, "word " * 200_000)
    assert long.value.code == "context_length_exceeded"
    with pytest.raises(openai.BadRequestError):
        ask(client, model, tool_choice="required")


def test_a_wrong_key_is_refused(asks_for_key, base_url, model):
    with pytest.raises(openai.AuthenticationError):
        ask(openai.OpenAI(base_url=f"{base_url}/v1", api_key="wrong", max_retries=0), model)
