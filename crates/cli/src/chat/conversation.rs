//! What was said, and the commands that change it.

use serde_json::{Value, json};

use super::Face;
use crate::failure::Failure;

/// Instructions and turns.
#[derive(Clone, Debug, Default)]
pub struct Conversation {
    /// Instructions for the model.
    pub system: Option<String>,
    /// Messages of user and assistant.
    turns: Vec<Value>,
}

impl Conversation {
    /// Nothing was said yet.
    pub fn new(system: Option<String>) -> Self {
        Self { system, turns: Vec::new() }
    }

    /// All of it, as a template or a server takes it.
    pub fn messages(&self) -> Vec<Value> {
        let system = self.system.as_ref().map(|text| json!({"role": "system", "content": text}));
        system.into_iter().chain(self.turns.iter().cloned()).collect()
    }

    /// The user says something.
    pub fn ask(&mut self, said: &str) {
        self.turns.push(json!({"role": "user", "content": said}));
    }

    /// The model has answered.
    pub fn answer(&mut self, said: &str) {
        self.turns.push(json!({"role": "assistant", "content": said}));
    }

    /// The question had no answer.
    pub fn take_back(&mut self) {
        self.turns.pop();
    }

    /// Only the question is there.
    pub fn is_one_question(&self) -> bool {
        self.turns.len() <= 1
    }

    /// Forgets the oldest question and what belongs to it.
    pub fn drop_oldest(&mut self) {
        let next = self.turns.iter().skip(1).position(|turn| turn["role"] == "user");
        self.turns.drain(..next.map_or(self.turns.len().min(1), |i| i + 1));
    }

    /// Obeys a command if it is one of those that are about what was said, or how it is shown.
    pub fn command(&mut self, command: &str, rest: &str, face: &mut dyn Face) -> Result<bool, Failure> {
        match command {
            "/reset" => {
                self.turns.clear();
                face.note("forgotten");
            }
            "/system" if rest.is_empty() => {
                face.note(self.system.as_deref().unwrap_or("no instructions"));
            }
            "/system" => {
                self.system = Some(rest.trim().to_owned());
                self.turns.clear();
                face.note("instructions set, conversation forgotten");
            }
            "/think" => face.think()?,
            _ => return Ok(false),
        }
        Ok(true)
    }
}

/// Asks until the answer is yes (or nothing) or no; the end of input is no.
pub fn agree(face: &mut dyn Face, question: &str) -> Result<bool, Failure> {
    loop {
        let Some(reply) = face.ask(question)? else { return Ok(false) };
        match reply.trim().to_ascii_lowercase().as_str() {
            "" | "y" | "yes" => return Ok(true),
            "n" | "no" => return Ok(false),
            _ => face.note("y or n"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_oldest_turn_goes_with_its_answer_and_instructions_stay() {
        let mut talk = Conversation::new(Some("be brief".to_owned()));
        for said in ["one", "two"] {
            talk.ask(said);
            talk.answer("yes");
        }
        talk.ask("three");
        let said = |talk: &Conversation| -> Vec<String> {
            let messages = talk.messages();
            messages.iter().filter_map(|message| message["content"].as_str()).map(str::to_owned).collect()
        };
        talk.drop_oldest();
        assert_eq!(said(&talk), ["be brief", "two", "yes", "three"]);
        talk.drop_oldest();
        assert!(talk.is_one_question());
        talk.take_back();
        talk.drop_oldest();
        assert_eq!(said(&talk), ["be brief"]);
    }
}
