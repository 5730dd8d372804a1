//! The chat with a server, against one that follows a script.
#![allow(clippy::unwrap_used, reason = "a test stops at the first surprise")]

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::process::{Child, ChildStdin, Command, Output, Stdio};
use std::sync::mpsc::{self, Receiver, Sender};
use std::thread::JoinHandle;

use serde_json::{Value, json};

/// A request as the server got it.
struct Request {
    head: String,
    body: Value,
}

/// What the server does with a connection after it has read the request.
type Act = Box<dyn FnOnce(&Request, &mut TcpStream) + Send>;

/// A server that takes one connection after the other, as it was told to, and says what it was asked.
struct Server {
    address: String,
    thread: JoinHandle<Vec<Request>>,
}

impl Server {
    fn new(acts: Vec<Act>) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap().to_string();
        let thread = std::thread::spawn(move || {
            let serve = |act: Act| {
                let (mut stream, _) = listener.accept().unwrap();
                let request = read_request(&stream);
                act(&request, &mut stream);
                request
            };
            acts.into_iter().map(serve).collect()
        });
        Self { address, thread }
    }

    fn requests(self) -> Vec<Request> {
        self.thread.join().unwrap()
    }
}

fn read_request(stream: &TcpStream) -> Request {
    let mut reader = BufReader::new(stream);
    let mut head = String::new();
    loop {
        let mut line = String::new();
        assert!(reader.read_line(&mut line).unwrap() > 0, "{head}");
        if line == "\r\n" {
            break;
        }
        head.push_str(&line);
    }
    let length = head.lines().find_map(|line| {
        let (name, value) = line.split_once(':')?;
        name.eq_ignore_ascii_case("content-length").then(|| value.trim().parse::<usize>().unwrap())
    });
    let mut body = vec![0; length.unwrap_or(0)];
    reader.read_exact(&mut body).unwrap();
    Request { head, body: serde_json::from_slice(&body).unwrap_or(Value::Null) }
}

fn respond(stream: &mut TcpStream, status: &str, body: &Value) {
    let body = body.to_string();
    let length = body.len();
    write!(
        stream,
        "HTTP/1.1 {status}\r\ncontent-type: application/json\r\ncontent-length: {length}\r\nconnection: close\r\n\r\n{body}"
    )
    .unwrap();
}

fn models() -> Act {
    Box::new(|request, stream| {
        assert!(request.head.starts_with("GET /v1/models "), "{}", request.head);
        let model = |id: &str, loaded: bool| json!({"id": id, "smoe": {"context": 8192, "loaded": loaded}});
        let list = json!({"object": "list", "data": [model("small", false), model("large", true)]});
        respond(stream, "200 OK", &list);
    })
}

fn begin_stream(stream: &mut TcpStream) {
    stream
        .write_all(
            b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n",
        )
        .unwrap();
}

fn chunk(stream: &mut TcpStream, text: &str) {
    write!(stream, "{:x}\r\n{text}\r\n", text.len()).unwrap();
}

/// A client that has what it waited for may be gone.
fn end_stream(stream: &mut TcpStream) {
    let _ = stream.write_all(b"0\r\n\r\n");
}

fn event(stream: &mut TcpStream, event: &Value) {
    chunk(stream, &format!("data: {event}\n\n"));
}

fn delta(delta: &Value) -> Value {
    json!({"choices": [{"index": 0, "delta": delta, "finish_reason": null}]})
}

/// Answers as a server does, with everything that may come before and between.
fn answer(pieces: &'static [&'static str]) -> Act {
    Box::new(move |_, stream| {
        begin_stream(stream);
        chunk(stream, ": waiting\n\n");
        event(stream, &json!({"choices": [], "smoe": {"phase": "queued", "ahead": 1}}));
        event(stream, &json!({"choices": [], "smoe": {"phase": "loading", "done": 1, "total": 2}}));
        event(
            stream,
            &json!({"choices": [], "smoe": {"phase": "prefill", "done": 5, "total": 10, "cached": 3}}),
        );
        event(stream, &delta(&json!({"role": "assistant", "content": ""})));
        event(stream, &delta(&json!({"reasoning_content": "hm"})));
        for piece in pieces {
            event(stream, &delta(&json!({"content": piece})));
        }
        event(stream, &json!({"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]}));
        let details = json!({"cached_tokens": 3});
        let usage = json!({"prompt_tokens": 13, "completion_tokens": 5, "prompt_tokens_details": details});
        event(stream, &json!({"choices": [], "usage": usage}));
        // An event in two pieces of the transfer.
        chunk(stream, "data: [DO");
        chunk(stream, "NE]\n\n");
        end_stream(stream);
    })
}

fn smoe(args: &[&str]) -> Child {
    Command::new(env!("CARGO_BIN_EXE_smoe"))
        .args(args)
        .env_remove("SMOE_API_KEY")
        .env_remove("OPENAI_API_KEY")
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap()
}

fn chat(server: &Server, more: &[&str], lines: &str) -> Output {
    let mut child = smoe(&[&["chat", "--connect", &server.address], more].concat());
    // It may be gone already.
    let _ = child.stdin.take().unwrap().write_all(lines.as_bytes());
    child.wait_with_output().unwrap()
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8(bytes.to_vec()).unwrap()
}

#[test]
fn a_conversation_goes_on_with_what_was_said() {
    let server =
        Server::new(vec![models(), answer(&["**Green** ", "\u{1b}[1mis", " it.\n"]), answer(&["Yes."])]);
    let flags =
        ["--system", "Be brief.", "--max-tokens", "64", "--temperature", "0.7", "--api-key", "secret"];
    let output = chat(&server, &flags, "What colour?\nSure?\n/stats\n");
    // A pipe gets the bytes as they came.
    assert_eq!(text(&output.stdout), "**Green** \u{1b}[1mis it.\n\nYes.\n", "{}", text(&output.stderr));
    assert!(output.status.success());
    let told = text(&output.stderr);
    assert!(told.contains("prompt 10 tokens (+3 reused)") && told.contains("answer 5 tokens"), "{told}");
    assert!(told.contains("2 answers"), "{told}");

    let requests = server.requests();
    assert!(
        requests.iter().all(|request| request.head.to_lowercase().contains("authorization: bearer secret"))
    );
    assert!(requests[1].head.starts_with("POST /v1/chat/completions "), "{}", requests[1].head);
    // The model that is loaded, and only what was set.
    let expected = json!({
        "model": "large",
        "messages": [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "What colour?"},
            {"role": "assistant", "content": "**Green** \u{1b}[1mis it.\n"},
            {"role": "user", "content": "Sure?"},
        ],
        "stream": true,
        "stream_options": {"include_usage": true},
        "smoe": {"progress": true},
        "max_tokens": 64,
        "temperature": 0.7,
        "seed": 1337,
    });
    assert_eq!(requests[2].body, expected);
}

#[test]
fn models_are_listed_and_switched() {
    let server = Server::new(vec![models(), models(), models(), models(), answer(&["Hi."])]);
    let output = chat(&server, &[], "/model\n/model none\n/model sm\nHello!\n");
    let told = text(&output.stderr);
    assert!(
        told.contains("* large, context of 8,192 positions, loaded") && told.contains("  small"),
        "{told}"
    );
    assert!(told.contains("no model none: the server has small, large"), "{told}");
    assert_eq!(text(&output.stdout), "Hi.\n");
    assert_eq!(server.requests()[4].body["model"], "small");

    let server = Server::new(vec![models()]);
    let output = chat(&server, &["--model", "none"], "Hello!\n");
    assert_eq!(output.status.code(), Some(1));
    assert!(text(&output.stderr).contains("no model none"), "{}", text(&output.stderr));
}

#[test]
fn a_server_that_wants_a_key_is_told_of() {
    let refuse: Act = Box::new(|request, stream| {
        assert!(!request.head.to_lowercase().contains("authorization"));
        let error =
            json!({"error": {"message": "missing key", "type": "authentication_error", "code": null}});
        respond(stream, "401 Unauthorized", &error);
    });
    let output = chat(&Server::new(vec![refuse]), &[], "Hello!\n");
    assert_eq!(output.status.code(), Some(1));
    let told = text(&output.stderr);
    assert!(told.contains("--api-key") && told.contains("missing key"), "{told}");
}

#[test]
fn a_chat_outlives_errors_before_and_in_the_stream_and_a_cut_connection() {
    let busy: Act = Box::new(|_, stream| {
        let error = json!({"error": {"message": "too many \u{1b}[31mwait", "type": "rate_limit_error"}});
        respond(stream, "429 Too Many Requests", &error);
    });
    let breaks: Act = Box::new(|_, stream| {
        begin_stream(stream);
        event(stream, &delta(&json!({"content": "I beg"})));
        event(stream, &json!({"error": {"message": "the disk is gone", "type": "api_error"}}));
        end_stream(stream);
    });
    let cut: Act = Box::new(|_, stream| {
        begin_stream(stream);
        event(stream, &delta(&json!({"content": "I was"})));
    });
    let ends: Act = Box::new(|_, stream| {
        begin_stream(stream);
        event(stream, &delta(&json!({"content": "I am"})));
        end_stream(stream);
    });
    let nonsense: Act = Box::new(|_, stream| {
        begin_stream(stream);
        chunk(stream, "data: <html>\n\n");
        end_stream(stream);
    });
    let server = Server::new(vec![models(), busy, breaks, cut, ends, nonsense, answer(&["Here."])]);
    let output = chat(&server, &[], "one\ntwo\nthree\nfour\nfive\nsix\n");
    let told = text(&output.stderr);
    assert!(output.status.success(), "{told}");
    assert_eq!(told.matches("error: ").count(), 5, "{told}");
    // What a server says does not reach the terminal as it is.
    assert!(told.contains("error: too many [31mwait") && told.contains("error: the disk is gone"), "{told}");
    assert!(told.contains("closed the connection before the answer was over"), "{told}");
    assert!(told.contains("no JSON"), "{told}");
    assert!(text(&output.stdout).ends_with("Here.\n"));
    // None of the questions without an answer is remembered.
    let messages = &server.requests()[6].body["messages"];
    assert_eq!(*messages, json!([{"role": "user", "content": "six"}]));
}

#[test]
fn a_context_that_is_full_is_said_and_nothing_is_dropped_unasked() {
    let full: Act = Box::new(|_, stream| {
        let message = "9000 tokens do not fit 8192 positions";
        respond(
            stream,
            "400 Bad Request",
            &json!({"error": {"message": message, "code": "context_length_exceeded"}}),
        );
    });
    let server = Server::new(vec![models(), answer(&["Yes."]), full, answer(&["No."])]);
    let output = chat(&server, &[], "one\ntwo\nthree\n");
    let told = text(&output.stderr);
    assert!(told.contains("9000 tokens do not fit") && told.contains("/reset forgets"), "{told}");
    assert_eq!(server.requests()[3].body["messages"].as_array().unwrap().len(), 3);
}

#[test]
fn nobody_at_the_address_is_a_failure_that_names_it() {
    let address = {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        listener.local_addr().unwrap().to_string()
    };
    let output = smoe(&["chat", "--connect", &address]).wait_with_output().unwrap();
    assert_eq!(output.status.code(), Some(1));
    assert!(text(&output.stderr).contains(&address), "{}", text(&output.stderr));
    for args in [
        &["chat"][..],
        &["chat", "demo", "--connect", "localhost"],
        &["chat", "--connect", "localhost", "--ring", "4"],
        &["chat", "--connect", "https://localhost"],
        &["chat", "demo", "--model", "x"],
    ] {
        let output = smoe(args).wait_with_output().unwrap();
        assert_eq!(output.status.code(), Some(2), "{args:?}: {}", text(&output.stderr));
    }
}

/// Holds a stream open, says when it has begun, and when the client has closed it.
#[cfg(unix)]
fn held(begun: Sender<()>, closed: Sender<()>) -> Act {
    Box::new(move |_, stream| {
        begin_stream(stream);
        event(stream, &delta(&json!({"content": "Once upon"})));
        begun.send(()).unwrap();
        // The client has no more to say: what can be read is the end.
        let mut rest = Vec::new();
        let _ = stream.read_to_end(&mut rest);
        assert!(rest.is_empty());
        closed.send(()).unwrap();
    })
}

/// Ctrl-C while the server is silent: the connection is closed at once, what was said stays in the conversation.
#[cfg(unix)]
#[test]
fn ctrl_c_closes_the_connection_and_keeps_what_was_said() {
    let ((begun, has_begun), (closed, is_closed)) = (mpsc::channel(), mpsc::channel());
    let server = Server::new(vec![models(), held(begun, closed), answer(&["The end."])]);
    let mut child = smoe(&["chat", "--connect", &server.address]);
    let mut stdin: ChildStdin = child.stdin.take().unwrap();
    let mut stdout = child.stdout.take().unwrap();
    stdin.write_all(b"A story!\n").unwrap();
    let wait = |receiver: &Receiver<()>| receiver.recv().unwrap();
    wait(&has_begun);
    let mut begin = [0; 9];
    stdout.read_exact(&mut begin).unwrap();
    assert_eq!(&begin, b"Once upon");
    let killed = Command::new("kill").args(["-INT", &child.id().to_string()]).status().unwrap();
    assert!(killed.success());
    wait(&is_closed);
    stdin.write_all(b"Go on.\n").unwrap();
    drop(stdin);
    let mut rest = String::new();
    stdout.read_to_string(&mut rest).unwrap();
    assert_eq!(rest, "\nThe end.\n");
    let output = child.wait_with_output().unwrap();
    assert!(output.status.success());
    assert!(text(&output.stderr).contains("[stopped]"), "{}", text(&output.stderr));
    let messages = &server.requests()[2].body["messages"];
    assert_eq!(messages[1], json!({"role": "assistant", "content": "Once upon"}));
    assert_eq!(messages[2]["content"], "Go on.");
}
