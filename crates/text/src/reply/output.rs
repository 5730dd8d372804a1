//! What comes out: events, adjacent ones of a kind joined; white space that waits; the text of a call not
//! announced yet.

use super::ReplyEvent;

/// Who speaks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Voice {
    Reasoning,
    Text,
}

/// How far the present call is.
#[derive(Clone, Debug, Default)]
enum Call {
    /// There is none, or it is over.
    #[default]
    Over,
    /// Not announced: its text, and the white space before it, in case it is none.
    Pending(String),
    /// Announced.
    Open,
}

/// The events of a reply, as they are made.
#[derive(Clone, Debug, Default)]
pub(super) struct Output {
    events: Vec<ReplyEvent>,
    /// White space that markup may follow.
    blank: String,
    /// Markup stands directly before.
    after_markup: bool,
    call: Call,
    /// Calls that are over.
    calls: usize,
    /// Whose words came last, unless a call did.
    last: Option<Voice>,
    /// A message begins: after words of the same voice it is set off from them.
    begins: bool,
}

impl Output {
    /// The events since the last time.
    pub(super) fn events(&mut self) -> Vec<ReplyEvent> {
        std::mem::take(&mut self.events)
    }

    /// Says a character; white space waits, if `holds`, for what follows it. Whether it was more than white
    /// space.
    pub(super) fn say(&mut self, voice: Voice, c: char, holds: bool) -> bool {
        let blank = c.is_whitespace();
        if blank && self.after_markup {
            return false;
        }
        if blank && holds {
            self.blank.push(c);
            return false;
        }
        self.keep_blank(voice);
        self.write(voice, c.encode_utf8(&mut [0; 4]));
        !blank
    }

    /// Says a text as it is.
    pub(super) fn verbatim(&mut self, text: &str) {
        self.keep_blank(Voice::Text);
        self.write(Voice::Text, text);
    }

    /// The white space that waits is part of what is said.
    pub(super) fn keep_blank(&mut self, voice: Voice) {
        let blank = std::mem::take(&mut self.blank);
        self.write(voice, &blank);
    }

    /// Markup: white space before and after it does not count.
    pub(super) fn drop_blank(&mut self) {
        self.blank.clear();
        self.after_markup = true;
    }

    /// Markup with which a message begins.
    pub(super) fn begin_message(&mut self) {
        self.drop_blank();
        self.begins = true;
    }

    fn write(&mut self, voice: Voice, text: &str) {
        if text.is_empty() {
            return;
        }
        self.after_markup = false;
        if std::mem::take(&mut self.begins) && self.last == Some(voice) {
            self.append(voice, "\n\n");
        }
        self.append(voice, text);
        self.last = Some(voice);
    }

    fn append(&mut self, voice: Voice, text: &str) {
        match (self.events.last_mut(), voice) {
            (Some(ReplyEvent::Reasoning(said)), Voice::Reasoning)
            | (Some(ReplyEvent::Text(said)), Voice::Text) => said.push_str(text),
            (_, Voice::Reasoning) => self.events.push(ReplyEvent::Reasoning(text.to_owned())),
            (_, Voice::Text) => self.events.push(ReplyEvent::Text(text.to_owned())),
        }
    }

    /// Something that may be a call begins with this text.
    pub(super) fn open(&mut self, text: &str) {
        let mut raw = std::mem::take(&mut self.blank);
        raw.push_str(text);
        self.call = Call::Pending(raw);
    }

    /// This text is part of what may be a call.
    pub(super) fn keep(&mut self, text: &str) {
        if let Call::Pending(raw) = &mut self.call {
            raw.push_str(text);
        }
    }

    /// Whether something may be a call and is not announced yet.
    pub(super) fn is_pending(&self) -> bool {
        matches!(self.call, Call::Pending(_))
    }

    /// Whether a call is announced and not over.
    pub(super) fn is_open(&self) -> bool {
        matches!(self.call, Call::Open)
    }

    /// Announces the call.
    pub(super) fn begin(&mut self, name: String, id: Option<String>) {
        self.call = Call::Open;
        self.last = None;
        self.events.push(ReplyEvent::ToolBegin { index: self.calls, name, id });
    }

    /// A piece of the call's arguments.
    pub(super) fn arguments(&mut self, text: &str) {
        match self.events.last_mut() {
            Some(ReplyEvent::ToolArguments { fragment, .. }) => fragment.push_str(text),
            _ => {
                let fragment = text.to_owned();
                self.events.push(ReplyEvent::ToolArguments { index: self.calls, fragment });
            }
        }
    }

    /// The call is over.
    pub(super) fn end(&mut self) {
        self.events.push(ReplyEvent::ToolEnd { index: self.calls });
        self.calls += 1;
        self.call = Call::Over;
        self.after_markup = true;
    }

    /// Announces a call, all of it.
    pub(super) fn whole(&mut self, name: String, id: Option<String>, arguments: &str) {
        self.begin(name, id);
        self.arguments(arguments);
        self.end();
    }

    /// Leaves what may be a call; whether it had been announced. If not, it is said as text.
    pub(super) fn give_up(&mut self) -> bool {
        match std::mem::take(&mut self.call) {
            Call::Over => true,
            Call::Open => {
                self.end();
                true
            }
            Call::Pending(raw) => {
                self.verbatim(&raw);
                false
            }
        }
    }

    /// Whether a call has been announced.
    pub(super) fn saw_call(&self) -> bool {
        self.calls > 0 || self.is_open()
    }
}
