//! Whether a vault's answers can be used: JSON objects with the keys that were asked for, and calls of tools that exist.
//!
//! Each request comes with worked examples, is answered greedily and without constraints, and is judged by a program: is
//! what the answer begins with a JSON object, has it the keys that it should have (or names it a tool, with that tool's
//! arguments), and are the values right. Requests are made from templates and a fixed seed.

use std::ops::ControlFlow;

use serde_json::{Map, Value, json};
use smoe_engine::{Control, Engine, Limits, Sampler, Sampling};
use smoe_testkit::random::Random;
use smoe_text::{ModelText, TemplateInput};

use crate::Result;

/// Requests of each kind.
const EACH: usize = 40;
/// Tokens of an answer at most; the longest right one has about 40.
const LONGEST: usize = 64;

/// A request and its answer.
#[derive(Debug)]
pub struct Task {
    messages: Vec<Value>,
    expected: Value,
}

/// How far an answer is right; each includes the one before.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Verdict {
    Nothing,
    /// It begins with a JSON object.
    Object,
    /// Of the wanted keys, or a call of an existing tool with its arguments.
    Formed,
    /// With the right values.
    Right,
}

/// The verdicts on the answers to all tasks, in their order.
pub struct Validity(Vec<Verdict>);

impl std::fmt::Debug for Validity {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let of = self.0.len();
        write!(f, "of {of} {} objects, {} well formed, {} right", self.parsed(), self.formed(), self.right())
    }
}

impl Validity {
    fn at_least(&self, verdict: Verdict) -> usize {
        self.0.iter().filter(|found| **found >= verdict).count()
    }

    pub fn parsed(&self) -> usize {
        self.at_least(Verdict::Object)
    }

    pub fn formed(&self) -> usize {
        self.at_least(Verdict::Formed)
    }

    pub fn right(&self) -> usize {
        self.at_least(Verdict::Right)
    }

    /// The share of what `reference` has right that is right here too.
    pub fn kept(&self, reference: &Self) -> f64 {
        let both = self.0.iter().zip(&reference.0);
        let both = both.filter(|(a, b)| **a == Verdict::Right && **b == Verdict::Right).count();
        both as f64 / reference.right().max(1) as f64
    }
}

const NAMES: [&str; 12] =
    ["Anna", "Tom", "Maria", "Peter", "Lucy", "James", "Sarah", "David", "Emma", "John", "Laura", "Paul"];
const CITIES: [&str; 12] = [
    "Paris", "London", "Berlin", "Madrid", "Rome", "Boston", "Chicago", "Tokyo", "Dublin", "Vienna", "Oslo",
    "Lima",
];
const THINGS: [&str; 10] =
    ["apples", "books", "chairs", "pencils", "lamps", "oranges", "bottles", "shirts", "cups", "plates"];

/// A statement and the object that says the same.
fn record(random: &mut Random) -> (String, Value) {
    let name = pick(random, &NAMES);
    let city = pick(random, &CITIES);
    let age = 18 + random.below(60);
    let said = match random.below(3) {
        0 => format!("{name} is {age} years old and lives in {city}."),
        1 => format!("{name} lives in {city} and is {age} years old."),
        _ => format!("{name}, {age}, lives in {city}."),
    };
    (said, json!({ "name": name, "age": age, "city": city }))
}

/// A question and the call that it asks for.
fn call(random: &mut Random) -> (String, Value) {
    match random.below(3) {
        0 => {
            let city = pick(random, &CITIES);
            let said = match random.below(2) {
                0 => format!("What is the weather in {city}?"),
                _ => format!("How is the weather in {city} today?"),
            };
            (said, json!({ "name": "get_weather", "arguments": { "city": city } }))
        }
        1 => {
            let (a, b) = (random.below(50), random.below(50));
            (format!("What is {a} plus {b}?"), json!({ "name": "add", "arguments": { "a": a, "b": b } }))
        }
        _ => {
            let (n, thing) = (2 + random.below(20), pick(random, &THINGS));
            let said = match random.below(2) {
                0 => format!("Please order {n} {thing}."),
                _ => format!("I want to buy {n} {thing}."),
            };
            (said, json!({ "name": "order", "arguments": { "item": thing, "count": n } }))
        }
    }
}

fn pick<'a>(random: &mut Random, list: &[&'a str]) -> &'a str {
    list[random.below(list.len())]
}

/// Makes what is said, and the answer to it.
type Maker = fn(&mut Random) -> (String, Value);

/// The requests.
pub fn tasks() -> Vec<Task> {
    let mut random = Random::new(11);
    let kinds: [(&str, Maker); 2] = [
        (
            "You turn sentences into JSON objects with the keys name, age and city. You answer with JSON only.",
            record,
        ),
        (
            "You call tools. The tools are get_weather(city), add(a, b) and order(item, count). You answer with a JSON \
             object that has the keys name and arguments, and with nothing else.",
            call,
        ),
    ];
    let mut tasks = Vec::new();
    for (system, make) in kinds {
        let mut examples = vec![json!({ "role": "system", "content": system })];
        // One of each sort, so that every tool is seen.
        let mut seen: Vec<String> = Vec::new();
        while seen.len() < 3 {
            let (said, answer) = make(&mut random);
            let sort = if answer["arguments"].is_null() { said.clone() } else { answer["name"].to_string() };
            if !seen.contains(&sort) {
                seen.push(sort);
                examples.push(json!({ "role": "user", "content": said }));
                examples.push(json!({ "role": "assistant", "content": answer.to_string() }));
            }
        }
        for _ in 0..EACH {
            let (said, expected) = make(&mut random);
            let mut messages = examples.clone();
            messages.push(json!({ "role": "user", "content": said }));
            tasks.push(Task { messages, expected });
        }
    }
    tasks
}

/// The object that a text begins with, in a fence of code or not.
fn object(text: &str) -> Option<Map<String, Value>> {
    let text = text.trim_start();
    let text = text.strip_prefix("```json").or_else(|| text.strip_prefix("```")).unwrap_or(text);
    match serde_json::Deserializer::from_str(text).into_iter::<Value>().next()? {
        Ok(Value::Object(object)) => Some(object),
        _ => None,
    }
}

/// True if no object begins what has been said so far, whatever follows.
fn is_hopeless(text: &str) -> bool {
    let text = text.trim_start();
    !(text.is_empty() || text.starts_with(['{', '`']))
}

fn judge(text: &str, expected: &Value) -> Verdict {
    let Some(found) = object(text) else { return Verdict::Nothing };
    let found = Value::Object(found);
    let keys = |value: &Value| {
        let keys = value.as_object().map(|object| object.keys().cloned().collect::<Vec<_>>());
        let mut keys = keys.unwrap_or_default();
        keys.sort();
        keys
    };
    let formed = keys(&found) == keys(expected)
        && match found["name"].as_str() {
            Some(tool) if !expected["arguments"].is_null() => {
                let arguments: &[&str] = match tool {
                    "get_weather" => &["city"],
                    "add" => &["a", "b"],
                    "order" => &["count", "item"],
                    _ => return Verdict::Object,
                };
                keys(&found["arguments"]) == arguments
            }
            _ => expected["arguments"].is_null(),
        };
    match formed {
        false => Verdict::Object,
        true if found == *expected => Verdict::Right,
        true => Verdict::Formed,
    }
}

/// Has a model answer all tasks.
pub fn answer(engine: &mut Engine, model: &ModelText, tasks: &[Task]) -> Result<Validity> {
    let tokenizer = model.tokenizer.as_ref().ok_or("the model has no tokenizer")?;
    let template = model.chat_template.as_ref().ok_or("the model has no chat template")?;
    let limits = Limits { max_tokens: LONGEST, end_tokens: model.end_tokens.clone() };
    let mut verdicts = Vec::with_capacity(tasks.len());
    for task in tasks {
        let prompt = template.render(&TemplateInput {
            messages: task.messages.clone().into(),
            add_generation_prompt: true,
            bos_token: model.bos_token.clone(),
            eos_token: model.eos_token.clone(),
            ..TemplateInput::default()
        })?;
        let tokens = tokenizer.encode(&prompt)?;
        let mut session = engine.open_session()?;
        // The examples are computed once.
        engine.adopt(&mut session, &tokens);
        engine.sync(&mut session, &tokens, &mut Control::default())?;
        let mut sampler = Sampler::new(Sampling::default(), engine.spec().vocab_size)?;
        let mut ids = Vec::new();
        engine.generate(&mut session, &mut sampler, &limits, &mut Control::default(), &mut |token| {
            ids.push(token);
            let text = tokenizer.decode(&ids, true);
            if is_hopeless(&text) || object(&text).is_some() {
                ControlFlow::Break(())
            } else {
                ControlFlow::Continue(())
            }
        })?;
        engine.close(session, true);
        verdicts.push(judge(&tokenizer.decode(&ids, true), &task.expected));
    }
    Ok(Validity(verdicts))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn answers_are_judged_by_form_and_by_content() {
        let person = json!({ "name": "Anna", "age": 30, "city": "Oslo" });
        let weather = json!({ "name": "get_weather", "arguments": { "city": "Oslo" } });
        for (text, expected, verdict) in [
            (r#" {"age": 30, "city": "Oslo", "name": "Anna"} and more"#, &person, Verdict::Right),
            ("```json\n{\"name\": \"Anna\", \"age\": 31, \"city\": \"Oslo\"}", &person, Verdict::Formed),
            (r#"{"name": "Anna", "age": 30}"#, &person, Verdict::Object),
            (r#"Here: {"name": "Anna"}"#, &person, Verdict::Nothing),
            (r#"{"name": "Anna", "age""#, &person, Verdict::Nothing),
            ("[1, 2]", &person, Verdict::Nothing),
            (r#"{"name": "get_weather", "arguments": {"city": "Oslo"}}"#, &weather, Verdict::Right),
            (r#"{"name": "add", "arguments": {"a": 1, "b": 2}}"#, &weather, Verdict::Formed),
            (r#"{"name": "add", "arguments": {"city": "Oslo"}}"#, &weather, Verdict::Object),
            (r#"{"name": "weather", "arguments": {"city": "Oslo"}}"#, &weather, Verdict::Object),
        ] {
            assert_eq!(judge(text, expected), verdict, "{text}");
            assert!(!is_hopeless(text) || verdict == Verdict::Nothing, "{text}");
        }
    }

    #[test]
    fn every_request_has_an_answer_that_is_right() {
        let tasks = tasks();
        assert_eq!(tasks.len(), 2 * EACH);
        for task in &tasks {
            assert_eq!(judge(&task.expected.to_string(), &task.expected), Verdict::Right);
        }
    }
}
