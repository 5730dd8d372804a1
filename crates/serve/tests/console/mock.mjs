// A server with the console's contract and no model behind it: what it answers depends on words in the last
// message, so that a test can call for each case by name. `node mock.mjs [port]` serves it to look at.
//
//   long       many paragraphs, slowly             think      reasoning before the answer
//   torture    markdown of every kind, odd cuts    tool       a tool call, then an answer from its result
//   xss        hostile markdown                    queue      queued and loading before the prefill
//   wall       refused until fewer than 4 messages are sent (a system prompt not counted)
//   nearly     a prompt that nearly fills the context
//   broken     an error inside the stream          cut        the connection ends in the middle
import { createServer } from "node:http";
import { readFile } from "node:fs/promises";
import { pathToFileURL } from "node:url";

const PAGE = new URL("../../assets/console.html", import.meta.url);
// The policy that the page must be content with, and no way to turn a string into markup.
const POLICY = "default-src 'self' 'unsafe-inline'; connect-src 'self'; require-trusted-types-for 'script'";
const LAYERS = 48;
const EXPERTS = 128;

const MODELS = [
  {
    id: "qwen3-30b-a3b-q4",
    smoe: {
      path: "/vaults/qwen3-30b-a3b-q4", bytes: 17_312_940_032, layers: LAYERS, experts: EXPERTS, top_k: 8,
      context: 40960, bits: 4.5, loaded: true, family: "qwen3_moe",
    },
  },
  {
    id: "qwen3-235b-a22b-q4",
    smoe: {
      path: "/vaults/qwen3-235b-a22b-q4", bytes: 132_700_000_000, layers: 94, experts: 128, top_k: 8,
      context: 40960, bits: 4.5, loaded: false, family: "qwen3_moe",
    },
  },
  {
    id: "gpt-oss-120b",
    smoe: {
      path: "/vaults/gpt-oss-120b", bytes: 63_400_000_000, layers: 36, experts: 128, top_k: 4,
      context: 131072, bits: 4.25, loaded: false, family: "gpt_oss",
    },
  },
];

const TORTURE = `# Every kind of block

A paragraph with **bold**, *italic*, ***both***, ~~gone~~, \`code with <b>\`, a [link](https://example.org/a_(b)),
a bare https://example.org/path_with_underscores, snake_case_names, 2 * 3 * 4 and \\*no emphasis\\*.
Prices of $5 and $6 stay; $a^2 + b^2 = c^2$ does not.

## Lists

1. First
   - nested *bullet*
   - another
     1. deeper
2. Second, with code:

   \`\`\`js
   const x = "in a list";
   \`\`\`
3. Third

- [ ] open task
- [x] done task

> A quote with **weight**
> - and a list
>> and a quote within

| Kind | Bits | Size |
|:-----|:----:|-----:|
| q4 | 4.5 | 17.3 GB |
| q2 \\| vq | 2.25 | **8.9 GB** |

---

\`\`\`rust
/// Reads one expert. /* not a comment */
fn read(&mut self, key: Key) -> Result<Lease<'_>, Error> {
    let at = 16_384 * key.expert as u64; /* a block
    comment */ let name = "a \\"string\\"";
    self.disk.read(at, &mut self.slot)?; // direct
    Ok(Lease::new(self))
}
\`\`\`

\`\`\`python
def top_k(logits, k=8):
    """Ranks
    the experts."""
    return sorted(range(len(logits)), key=lambda i: -logits[i])[:k]  # stable
\`\`\`

The weights of a token's experts are a softmax over the chosen ones:

$$w_i = \\frac{e^{z_i}}{\\sum_{j \\in T} e^{z_j}}, \\quad T = \\operatorname{top}_k(z)$$

#hashtag is not a heading
- a list after a paragraph
- **bold
  over lines**

Unclosed **bold and \`code`;

const XSS = `<img src=x onerror="window.pwned=1"><script>window.pwned=2</script>

[click](javascript:window.pwned=3) [data](data:text/html,<script>window.pwned=4</script>)
[spaced]( javascript:window.pwned=5) [tab](java\tscript:window.pwned=6) <javascript:window.pwned=7>
![alt" onerror="window.pwned=8](https://outside.invalid/x.png)

\`\`\`"><img src=x onerror=window.pwned=9>
<svg onload=window.pwned=10>
\`\`\`

| <iframe src=javascript:window.pwned=11> | b |
|---|---|
| <b onmouseover=window.pwned=12>x</b> | [x](vbscript:window.pwned=13) |

[ok](https://example.org/?q="onmouseover="window.pwned=14)`;

const PARAGRAPHS = [
  "Each layer asks its router which experts this token needs. The router is a small matrix: one row an expert.",
  "Of 128 experts eight are chosen. Their records lie one after another on the disk, each on its own pages.",
  "What is in the ring already is computed at once; **what is not is read**, all of it at the same time.",
  "So the time of a token is what the disk makes of its misses, and the hit rate decides how many there are.",
];

const sleep = (ms) => new Promise((done) => setTimeout(done, ms));
/** Numbers that repeat: a linear congruential generator. */
const seeded = (seed) => () => (seed = (Math.imul(seed, 1664525) + 1013904223) >>> 0) / 2 ** 32;

/** Starts a mock on `port` (0: any free one); `speed` divides every pause. */
export async function startMock({ port = 0, speed = 1 } = {}) {
  const state = { loaded: MODELS[0].id, loading: null, running: 0, queued: 0, requests: [], cancelled: 0, key: null };
  const pause = (ms) => sleep(ms / speed);

  const server = createServer((request, response) => {
    route(request, response).catch((error) => {
      if (!response.headersSent) response.writeHead(500);
      response.end(String(error));
    });
  });

  async function route(request, response) {
    const path = new URL(request.url, "http://mock").pathname;
    if (path === "/") {
      response.writeHead(200, { "content-type": "text/html; charset=utf-8", "content-security-policy": POLICY });
      return response.end(await readFile(PAGE));
    }
    if (path === "/favicon.ico") return response.writeHead(204).end();
    if (state.key && request.headers.authorization !== `Bearer ${state.key}`) {
      return fail(response, 401, "invalid_api_key", "this server wants an API key");
    }
    if (path === "/v1/models") {
      const data = MODELS.map((model) => ({
        ...model, object: "model", created: 1760000000, owned_by: "smoe",
        smoe: { ...model.smoe, loaded: model.id === state.loaded },
      }));
      return json(response, 200, { object: "list", data });
    }
    if (path === "/smoe/instrument") return instrument(request, response);
    if (path === "/v1/chat/completions" && request.method === "POST") {
      let body = "";
      for await (const piece of request) body += piece;
      return complete(JSON.parse(body), request, response);
    }
    return fail(response, 404, "not_found", `no ${path} here`);
  }

  const json = (response, status, value) => {
    response.writeHead(status, { "content-type": "application/json" });
    response.end(JSON.stringify(value));
  };
  const fail = (response, status, code, message) =>
    json(response, status, { error: { message, type: "invalid_request_error", code } });

  async function complete(body, request, response) {
    state.requests.push(body);
    const turns = body.messages.filter((message) => message.role !== "system");
    const last = turns.at(-1);
    const asked = String(last?.content ?? "");
    const userAsked = String(turns.findLast((message) => message.role === "user")?.content ?? "");
    if (/\bwall\b/.test(userAsked) && turns.length >= 4) {
      return fail(
        response, 400, "context_length_exceeded",
        "the prompt has 43,120 tokens; the context holds 40,960: drop messages or start with a larger --context",
      );
    }

    let open = true;
    response.on("close", () => {
      if (open) state.cancelled += 1;
      open = false;
    });
    response.writeHead(200, { "content-type": "text/event-stream", "cache-control": "no-store" });
    const base = { id: "chatcmpl-1", object: "chat.completion.chunk", created: 1760000000, model: body.model };
    const send = (value) => open && response.write(`data: ${JSON.stringify({ ...base, ...value })}\n\n`);
    const phase = (smoe) => body.smoe?.progress && send({ choices: [], smoe });
    const delta = (part, finish = null) => send({ choices: [{ index: 0, delta: part, finish_reason: finish }] });

    if (/\bqueue\b/.test(userAsked)) {
      state.queued += 2;
      for (let ahead = 2; ahead > 0 && open; ahead--) {
        phase({ phase: "queued", ahead });
        await pause(500);
        state.queued -= 1;
      }
    }
    if (body.model !== state.loaded) {
      const total = 100;
      for (let done = 0; done <= total && open; done += 4) {
        state.loading = { model: body.model, done, total };
        phase({ phase: "loading", done, total });
        await pause(60);
      }
      if (open) state.loaded = body.model;
      state.loading = null;
    }
    state.running += 1;
    try {
      const prompt = /\bnearly\b/.test(userAsked) ? 36_900 : 40 + Math.ceil(JSON.stringify(body.messages).length / 4);
      const cached = turns.length > 1 ? Math.floor(prompt * 0.6) : 0;
      for (let done = cached; done < prompt && open; done += Math.ceil((prompt - cached) / 6)) {
        phase({ phase: "prefill", done, total: prompt, cached });
        if (open) response.write(": alive\n\n");
        await pause(/\bslow\b/.test(userAsked) ? 700 : 90);
      }
      phase({ phase: "decode" });
      delta({ role: "assistant" });
      let tokens = 0;
      const write = async (text, key = "content", gap = 24) => {
        const random = seeded(text.length);
        for (let at = 0; at < text.length && open; ) {
          const size = 1 + Math.floor(random() * 9);
          delta({ [key]: text.slice(at, at + size) });
          at += size;
          tokens += 1;
          await pause(gap);
        }
      };
      let finish = "stop";
      if (/\bthink\b/.test(asked)) {
        await write("The user wants me to think. First I look at **what is asked**.\n\nThen I answer it.", "reasoning_content");
      }
      if (last?.role === "tool") {
        await write(`The tool said: ${last.content}. So take a coat.`);
      } else if (/\btool\b/.test(asked)) {
        await write("Let me look that up.");
        const call = { index: 0, id: "call_1", type: "function", function: { name: "get_weather", arguments: "" } };
        delta({ tool_calls: [call] });
        for (const piece of ['{"city":', '"Lisbon",', '"unit":"c"}']) {
          delta({ tool_calls: [{ index: 0, function: { arguments: piece } }] });
          await pause(40);
        }
        finish = "tool_calls";
      } else if (/\bxss\b/.test(asked)) {
        await write(XSS, "content", 4);
      } else if (/\btorture\b/.test(asked)) {
        await write(TORTURE, "content", 4);
      } else if (/\bbroken\b/.test(asked)) {
        await write("This will not end well");
        const message = "experts.smoe: layer 12, expert 87: checksum is 0x1f2e, expected 0x9a01";
        send({ error: { message, type: "server_error", code: "damaged_record" } });
        open = false;
        return response.end();
      } else if (/\bcut\b/.test(asked)) {
        await write("The line goes dead in the middle of");
        open = false;
        return response.destroy();
      } else if (/\blong\b/.test(asked)) {
        for (let i = 0; i < 40 && open; i++) await write(`${PARAGRAPHS[i % 4]}\n\n`);
      } else {
        await write(`You said: ${asked.slice(0, 80)}\n\n${PARAGRAPHS[0]}\n\n- It reads **what it needs**\n- and nothing else`);
      }
      if (!open) return;
      delta({}, finish);
      const usage = {
        prompt_tokens: prompt, completion_tokens: tokens, total_tokens: prompt + tokens,
        prompt_tokens_details: { cached_tokens: cached },
      };
      if (body.stream_options?.include_usage) send({ choices: [], usage });
      open = false;
      response.end("data: [DONE]\n\n");
    } finally {
      state.running -= 1;
    }
  }

  // Routing that looks like routing: some experts are favourites of a layer, the rest comes and goes.
  const random = seeded(7);
  const favour = Float64Array.from({ length: LAYERS * EXPERTS }, () => random() ** 6);
  const resident = Buffer.alloc((LAYERS * EXPERTS) / 8);
  for (let cell = 0; cell < LAYERS * EXPERTS; cell++) {
    if (favour[cell] > 0.08) resident[cell >> 3] |= 1 << (cell & 7);
  }
  function routeTokens(tokens) {
    const uses = new Uint16Array(LAYERS * EXPERTS);
    for (let layer = 0; layer < LAYERS; layer++) {
      for (let use = 0; use < tokens * 8; use++) {
        let cell = 0;
        do cell = layer * EXPERTS + Math.floor(random() * EXPERTS);
        while (random() > favour[cell] + 0.02);
        uses[cell] += 1;
        resident[cell >> 3] |= 1 << (cell & 7);
        if (random() < 0.3) {
          const out = layer * EXPERTS + Math.floor(random() * EXPERTS);
          if (favour[out] < 0.3) resident[out >> 3] &= ~(1 << (out & 7));
        }
      }
    }
    return uses;
  }

  async function instrument(request, response) {
    let open = true;
    response.on("close", () => (open = false));
    response.writeHead(200, { "content-type": "text/event-stream", "cache-control": "no-store" });
    const wave = (mid, swing, period) => mid + swing * Math.sin(Date.now() / period) + swing * (random() - 0.5);
    while (open) {
      const running = state.running > 0;
      const used = wave(10.4e9, running ? 2e8 : 1e6, 4000);
      const step = running
        ? { attention: 14, dense: 6.2, router: 1.4, demand_wait: wave(38, 9, 900), experts: 31, head: 5.1, sampling: 0.6, other: 2.2 }
        : { attention: 0, dense: 0, router: 0, demand_wait: 0, experts: 0, head: 0, sampling: 0, other: 0 };
      const event = {
        model: state.loaded, state: state.loading ? "loading" : running ? "running" : "idle",
        loading: state.loading ? { done: state.loading.done, total: state.loading.total } : undefined,
        running: state.running, queued: state.queued, context: 40960,
        tok_s: running ? wave(9.6, 0.8, 1500) : 0, step_ms: step, hit_rate: wave(0.914, 0.02, 2100),
        disk_gb_s: running ? wave(2.9, 0.5, 1100) : 0, disk_bytes_per_token: running ? 301_000_000 : 0,
        memory: {
          budget_bytes: 14_000_000_000, used_bytes: Math.round(used), available_bytes: 3_100_000_000,
          pressure: state.pressure ?? "ok",
        },
        kv: { blocks: 1280, used: 212, cached: 640 }, ring: { slots: 1418, limit: 1536 },
        atlas: {
          layers: LAYERS, experts: EXPERTS,
          uses: Buffer.from(routeTokens(running ? 3 : 0).buffer).toString("base64"),
          resident: resident.toString("base64"),
        },
      };
      response.write(`data: ${JSON.stringify(event)}\n\n`);
      await sleep(running || state.loading ? 250 : 500);
    }
  }

  await new Promise((done) => server.listen(port, "127.0.0.1", done));
  return {
    state, torture: TORTURE,
    url: `http://127.0.0.1:${server.address().port}`,
    close: () => {
      server.closeAllConnections();
      server.close();
    },
  };
}

if (import.meta.url === pathToFileURL(process.argv[1]).href) {
  const mock = await startMock({ port: Number(process.argv[2] ?? 8080) });
  process.stdout.write(`${mock.url}\n`);
}
