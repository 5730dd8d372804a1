use smoe_text::*; use serde_json::json;
#[test] fn fuel() {
  for n in [100usize, 400, 1600] {
    let mut m = vec![json!({"role":"system","content":"You are an agent."}), json!({"role":"user","content":"Do it."})];
    for i in 0..n { m.push(json!({"role":"assistant","content":"","reasoning_content":"think a little","tool_calls":[{"id":format!("abcde{i:04}"),"type":"function","function":{"name":"read","arguments":{"path":format!("/a/b/{i}")}}}]}));
      m.push(json!({"role":"tool","tool_call_id":format!("abcde{i:04}"),"name":"read","content":"x".repeat(400)})); }
    m.push(json!({"role":"assistant","content":"done"})); m.push(json!({"role":"user","content":"again"}));
    let mut paths: Vec<_> = std::fs::read_dir("/tmp/tmpl").unwrap().map(|e| e.unwrap().path()).collect(); paths.sort();
    for p in paths { let t = ChatTemplate::compile(&std::fs::read_to_string(&p).unwrap()).unwrap();
      let i = TemplateInput::from_json(&json!({"messages":m,"tools":[{"type":"function","function":{"name":"read","description":"d","parameters":{"type":"object","properties":{"path":{"type":"string"}}}}}],"add_generation_prompt":true,"bos_token":"<s>","eos_token":"</s>"})).unwrap();
      eprint!("{n} {} ", p.file_stem().unwrap().to_string_lossy()); if let Err(e) = t.render(&i) { eprintln!("ERR {e}") } }
  }
}
