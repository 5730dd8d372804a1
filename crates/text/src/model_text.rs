//! All that a model directory says about text, from its side files as they were published.
//!
//! | file | what is read |
//! |---|---|
//! | `tokenizer.json` | the tokenizer |
//! | `tokenizer_config.json` | chat template, begin and end tokens |
//! | `chat_template.jinja`, `additional_chat_templates/tool_use.jinja` | chat templates of newer checkpoints; they win |
//! | `chat_template.json` | chat template of a multimodal checkpoint, if there is no other |
//! | `generation_config.json` | ids that end an answer, the maker's sampling settings |
//! | `config.json` | ids that end an answer, if the former has none |
//!
//! Every file may be absent. One that is there must be sound: a model that speaks with the wrong template or never
//! ends is worse than one that does not load.

use serde_json::Value as Json;

use crate::error::TextError;
use crate::reply::ReplyFormat;
use crate::template::ChatTemplate;
use crate::tokenizer::Tokenizer;

const TOKENIZER: &str = "tokenizer.json";
const TOKENIZER_CONFIG: &str = "tokenizer_config.json";
const TEMPLATE_JINJA: &str = "chat_template.jinja";
const TOOL_USE_JINJA: &str = "additional_chat_templates/tool_use.jinja";
const TEMPLATE_JSON: &str = "chat_template.json";
const GENERATION_CONFIG: &str = "generation_config.json";
const CONFIG: &str = "config.json";

/// Returns a file of a model directory by its name, if there is one.
type Files<'a> = &'a dyn Fn(&str) -> Option<Vec<u8>>;

/// Tokenizer, chat template and settings of a model.
#[derive(Clone, Debug, Default)]
#[non_exhaustive]
pub struct ModelText {
    /// The tokenizer.
    pub tokenizer: Option<Tokenizer>,
    /// The chat template, with the one for tools where the model has two.
    pub chat_template: Option<ChatTemplate>,
    /// The ids that end an answer, each once: those of `generation_config.json`, or else of `config.json`, or
    /// else that of the tokenizer's end token.
    pub end_tokens: Vec<u32>,
    /// How the model's makers sample from it.
    pub defaults: GenerationDefaults,
    /// The token that begins a text.
    pub bos_token: Option<String>,
    /// The token that ends a text.
    pub eos_token: Option<String>,
}

/// Sampling settings of `generation_config.json`; `None` where it is silent.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
#[non_exhaustive]
pub struct GenerationDefaults {
    /// Whether to sample at all, or to take the most likely token.
    pub do_sample: Option<bool>,
    /// Divisor of the logits.
    pub temperature: Option<f32>,
    /// Smallest set of tokens with at least this probability.
    pub top_p: Option<f32>,
    /// Number of likeliest tokens; 0 is all.
    pub top_k: Option<u32>,
    /// Least probability, as a part of the likeliest token's.
    pub min_p: Option<f32>,
    /// Divisor of the positive logits of tokens that have occurred.
    pub repetition_penalty: Option<f32>,
}

impl ModelText {
    /// Assembles a model's texts from its files.
    ///
    /// # Errors
    /// Names the file that is not what it should be, and where it can the field.
    pub fn load(files: &dyn Fn(&str) -> Option<Vec<u8>>) -> Result<Self, TextError> {
        let tokenizer = match files(TOKENIZER) {
            Some(bytes) => Some(Tokenizer::from_bytes(&bytes).map_err(|error| in_file(TOKENIZER, error))?),
            None => None,
        };
        let tokenizer_config = Document::read(files, TOKENIZER_CONFIG)?;
        let generation_config = Document::read(files, GENERATION_CONFIG)?;
        let bos_token = tokenizer_config.token("bos_token")?;
        let eos_token = tokenizer_config.token("eos_token")?;

        let mut end_tokens = generation_config.ids("/eos_token_id")?;
        if end_tokens.is_empty() {
            let config = Document::read(files, CONFIG)?;
            end_tokens = config.ids("/eos_token_id")?;
            if end_tokens.is_empty() {
                // Where a text model is part of a larger one.
                end_tokens = config.ids("/text_config/eos_token_id")?;
            }
        }
        // As in the reference's `generate`: the tokenizer's token counts only where no config names one.
        if let (true, Some(tokenizer), Some(token)) = (end_tokens.is_empty(), &tokenizer, &eos_token) {
            end_tokens.extend(tokenizer.token_to_id(token));
        }
        Ok(ModelText {
            tokenizer,
            chat_template: chat_template(files, &tokenizer_config)?,
            end_tokens: each_once(end_tokens),
            defaults: GenerationDefaults::of(&generation_config)?,
            bos_token,
            eos_token,
        })
    }
}

impl ModelText {
    /// How the model writes reasoning and calls, as its chat template tells.
    pub fn reply_format(&self) -> ReplyFormat {
        ReplyFormat::detect(self.chat_template.as_ref().map_or("", ChatTemplate::source))
    }
}

impl GenerationDefaults {
    fn of(config: &Document) -> Result<Self, TextError> {
        let number =
            |field: &'static str| config.number(field).map(|number| number.map(|number| number as f32));
        Ok(GenerationDefaults {
            do_sample: match config.get("/do_sample") {
                None => None,
                Some(value) => {
                    Some(value.as_bool().ok_or_else(|| config.wrong("do_sample", "true or false"))?)
                }
            },
            temperature: number("temperature")?,
            top_p: number("top_p")?,
            // Some write -1 for all.
            top_k: config.number("top_k")?.map(|number| number as u32),
            min_p: number("min_p")?,
            repetition_penalty: number("repetition_penalty")?,
        })
    }
}

/// The template that counts, and the one for tools beside it.
fn chat_template(files: Files<'_>, tokenizer_config: &Document) -> Result<Option<ChatTemplate>, TextError> {
    let mut tool_use = text(files, TOOL_USE_JINJA)?.map(|source| (TOOL_USE_JINJA, source));
    let default = if let Some(source) = text(files, TEMPLATE_JINJA)? {
        Some((TEMPLATE_JINJA, source))
    } else if let Some((default, tools)) = tokenizer_config.templates()? {
        tool_use = tool_use.or(tools.map(|source| (TOKENIZER_CONFIG, source)));
        Some((TOKENIZER_CONFIG, default))
    } else {
        let other = Document::read(files, TEMPLATE_JSON)?.templates()?;
        other.map(|(default, _)| (TEMPLATE_JSON, default))
    };
    let Some((file, source)) = default else { return Ok(None) };
    let template = ChatTemplate::compile(&source).map_err(|error| in_file(file, error))?;
    match tool_use {
        Some((file, source)) => {
            template.with_tool_use(&source).map_err(|error| in_file(file, error)).map(Some)
        }
        None => Ok(Some(template)),
    }
}

fn in_file(file: &str, error: TextError) -> TextError {
    TextError::File { file: file.to_owned(), source: Box::new(error) }
}

/// A file as text.
fn text(files: Files<'_>, file: &'static str) -> Result<Option<String>, TextError> {
    files(file)
        .map(|bytes| String::from_utf8(bytes).map_err(|_| TextError::NotUtf8 { file: file.to_owned() }))
        .transpose()
}

fn each_once(mut ids: Vec<u32>) -> Vec<u32> {
    let mut seen = std::collections::HashSet::new();
    ids.retain(|id| seen.insert(*id));
    ids
}

/// A JSON file; one that is absent is like an empty object.
struct Document {
    file: &'static str,
    json: Json,
}

impl Document {
    fn read(files: Files<'_>, file: &'static str) -> Result<Self, TextError> {
        let Some(bytes) = files(file) else { return Ok(Document { file, json: Json::Null }) };
        let json = serde_json::from_slice(&bytes)
            .map_err(|source| TextError::Json { file: file.to_owned(), source })?;
        let document = Document { file, json };
        if document.json.is_object() { Ok(document) } else { Err(document.wrong("", "an object")) }
    }

    /// A field that is there and not null.
    fn get(&self, path: &str) -> Option<&Json> {
        self.json.pointer(path).filter(|value| !value.is_null())
    }

    fn wrong(&self, field: &str, expected: &'static str) -> TextError {
        let field = if field.is_empty() { "(root)" } else { field.trim_start_matches('/') };
        TextError::Field { file: self.file.to_owned(), field: field.to_owned(), expected }
    }

    fn number(&self, field: &'static str) -> Result<Option<f64>, TextError> {
        match self.get(&format!("/{field}")) {
            None => Ok(None),
            Some(value) => value.as_f64().map(Some).ok_or_else(|| self.wrong(field, "a number")),
        }
    }

    /// An id or a list of ids. Negative ones stand for none.
    fn ids(&self, path: &str) -> Result<Vec<u32>, TextError> {
        let wrong = || self.wrong(path, "a token id or a list of them");
        let id = |value: &Json| -> Result<Option<u32>, TextError> {
            let id = value.as_i64().ok_or_else(wrong)?;
            if id < 0 { Ok(None) } else { u32::try_from(id).map(Some).map_err(|_| wrong()) }
        };
        match self.get(path) {
            None => Ok(Vec::new()),
            Some(Json::Array(values)) => values.iter().filter_map(|value| id(value).transpose()).collect(),
            Some(value) => Ok(id(value)?.into_iter().collect()),
        }
    }

    /// A token, as a string or as an object with its `content`.
    fn token(&self, field: &'static str) -> Result<Option<String>, TextError> {
        match self.get(&format!("/{field}")) {
            None => Ok(None),
            Some(value) => match value.as_str().or(value["content"].as_str()) {
                Some(token) => Ok(Some(token.to_owned())),
                None => Err(self.wrong(field, "a string or an object with `content`")),
            },
        }
    }

    /// The field `chat_template`, as one template or as a list of named ones: the default and that for tools.
    fn templates(&self) -> Result<Option<(String, Option<String>)>, TextError> {
        let expected = "a template or a list of templates with `name` and `template`, one of them `default`";
        let wrong = || self.wrong("chat_template", expected);
        let named = match self.get("/chat_template") {
            None => return Ok(None),
            Some(Json::String(source)) => return Ok(Some((source.clone(), None))),
            Some(Json::Array(named)) => named,
            Some(_) => return Err(wrong()),
        };
        let mut templates = Vec::new();
        for entry in named {
            let (Some(name), Some(source)) = (entry["name"].as_str(), entry["template"].as_str()) else {
                return Err(wrong());
            };
            templates.push((name, source));
        }
        let find = |wanted| templates.iter().find(|(name, _)| *name == wanted).map(|(_, source)| *source);
        let only = if let [(_, source)] = templates[..] { Some(source) } else { None };
        let default = find("default").or(only).ok_or_else(wrong)?;
        Ok(Some((default.to_owned(), find("tool_use").map(str::to_owned))))
    }
}
