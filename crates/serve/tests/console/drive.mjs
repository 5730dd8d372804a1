// Drives the console in a real browser, by keyboard and pointer, and says what does not hold.
//
//   npm ci && node drive.mjs                     against mock.mjs
//   BASE_URL=http://127.0.0.1:8000 node drive.mjs    against a real server: what holds for any model
//
// A real model has to be slow enough to be watched (20 to 100 tokens a second) and talk for some hundred tokens: what
// `.ci/serve` makes and serves is. Checks that need certain answers are left to the mock, and that is said.
//
// CHROMIUM names the browser (default /usr/bin/chromium); SHOTS a folder for pictures of each look; ONLY a part of
// the name of the checks to run.
import assert from "node:assert/strict";
import { mkdir } from "node:fs/promises";
import { chromium } from "playwright-core";
import { startMock } from "./mock.mjs";

const real = process.env.BASE_URL;
const shots = process.env.SHOTS;
const mock = real ? null : await startMock({ speed: 4 });
const base = real ?? mock.url;
const patience = real ? 120_000 : 10_000;
const browser = await chromium.launch({ executablePath: process.env.CHROMIUM ?? "/usr/bin/chromium", args: ["--no-sandbox"] });

/** A fresh browser profile on the page, with everything that it must not do recorded. */
async function open(options = {}) {
  const context = await browser.newContext({ viewport: { width: 1280, height: 800 }, ...options });
  const page = await context.newPage();
  page.setDefaultTimeout(patience);
  const faults = [];
  page.on("console", (message) => {
    // The browser itself reports an answer that is an error; the page's own errors are what counts.
    if (message.type() === "error" && !/Failed to load resource.*(40[01]|INCOMPLETE_CHUNKED)/.test(message.text())) faults.push(message.text());
  });
  page.on("pageerror", (error) => faults.push(error.stack ?? String(error)));
  page.on("request", (request) => {
    const url = request.url();
    if (!url.startsWith(base) && !url.startsWith("blob:")) faults.push(`a request outside: ${url}`);
  });
  await page.goto(`${base}/`);
  await page.waitForFunction(() => document.querySelector("#model .name").textContent !== "No model");
  return { context, page, faults };
}

const idle = (page) => page.waitForSelector('#send[aria-label="Send"]', { timeout: patience });
const prose = (page) => page.locator(".bot > .prose").last();
async function ask(page, text, wait = true) {
  await page.fill("#prompt", text);
  await page.keyboard.press("Enter");
  if (wait) {
    await page.waitForSelector('#send[aria-label="Stop"]');
    await idle(page);
  }
}
const lengthOf = async (page) => (await prose(page).textContent()).length;
async function grows(page, from = 0) {
  await page.waitForFunction((n) => [...document.querySelectorAll(".bot > .prose")].at(-1)?.textContent.length > n, from);
  return lengthOf(page);
}
/** Answers that the server is at work on. */
async function running() {
  if (mock) return mock.state.running;
  const text = await (await fetch(`${base}/metrics`)).text();
  return [...text.matchAll(/^smoe_jobs_(?:running|queued)\{.*\} (\d+)$/gm)].reduce((sum, [, n]) => sum + Number(n), 0);
}
const shoot = async (page, name) => {
  if (!shots) return;
  await mkdir(shots, { recursive: true });
  await page.evaluate(() => Promise.allSettled(document.getAnimations()
    .filter((one) => one.effect.getComputedTiming().iterations !== Infinity).map((one) => one.finished)));
  await page.screenshot({ path: `${shots}/${name}.png` });
};

// ---- The checks: what holds for any server, then what needs the mock's answers ------------------------

const forAny = {
  async "an answer streams, and can be stopped"({ page }) {
    await ask(page, "Write a long story about a lighthouse, at least ten paragraphs. long", false);
    const first = await grows(page);
    const later = await grows(page, first);
    assert.ok(later > first, "the answer grew");
    assert.match(await page.textContent("#live"), /token/);
    await page.keyboard.press("Escape");
    await idle(page);
    const end = await lengthOf(page);
    assert.ok((await page.textContent(".bot .note")).includes("Stopped"));
    await page.evaluate(() => new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done))));
    assert.equal(await lengthOf(page), end, "a stopped answer grows no more");
    assert.match(await page.textContent(".bot .stats"), /first after/);
  },

  async "an edited message is a variant of the first, and both can be seen"({ page }) {
    await ask(page, "Say one");
    await page.press("#prompt", "ArrowUp");
    await page.fill(".edit textarea", "Say two");
    await page.keyboard.press("Enter");
    await page.waitForSelector('#send[aria-label="Stop"]');
    await idle(page);
    assert.equal(await page.textContent(".user .bubble"), "Say two");
    assert.match(await page.textContent(".user .acts"), /2 \/ 2/);
    await page.click('.user [aria-label="Previous variant"]');
    assert.equal(await page.textContent(".user .bubble"), "Say one");
    assert.equal(await page.locator(".msg").count(), 2);
  },

  async "an answer can be made again, and the first is kept"({ page }) {
    await ask(page, "Say something");
    await page.click('.bot [aria-label="Answer again"]');
    await page.waitForSelector('#send[aria-label="Stop"]');
    await idle(page);
    assert.match(await page.textContent(".bot .acts"), /2 \/ 2/);
    await page.click('.bot [aria-label="Previous variant"]');
    assert.match(await page.textContent(".bot .acts"), /1 \/ 2/);
  },

  async "conversations outlive the page; they can be renamed, exported and deleted"({ page }) {
    await ask(page, "Remember me");
    await page.reload();
    await page.waitForSelector(".bot .stats:not(:empty)");
    assert.equal(await page.textContent(".user .bubble"), "Remember me");
    await page.click('#chats [aria-label^="More about"]');
    await page.click('[role="menuitem"]:has-text("Rename")');
    await page.keyboard.type("A better name");
    await page.keyboard.press("Enter");
    assert.match(await page.textContent("#chats .chat"), /A better name/);
    for (const [label, ending] of [["Export as Markdown", ".md"], ["Export as JSON", ".json"]]) {
      await page.click('#chats [aria-label^="More about"]');
      const [file] = await Promise.all([page.waitForEvent("download"), page.click(`[role="menuitem"]:has-text("${label}")`)]);
      assert.equal(file.suggestedFilename(), `A better name${ending}`);
    }
    await page.click('#chats [aria-label^="More about"]');
    await page.click('[role="menuitem"]:has-text("Delete")');
    assert.equal(await page.locator("#chats .chat").count(), 0);
    await page.click('.toast button:has-text("Undo")');
    assert.match(await page.textContent("#chats .chat"), /A better name/);
  },

  async "the meters move while it answers"({ page }) {
    await page.waitForSelector("#state:not(:has-text('connecting'))");
    await ask(page, "Write a long list of rivers, one a line. long", false);
    await page.waitForSelector("#state.run");
    await page.waitForFunction(() => /tok\/s/.test(document.querySelector("#t-rate b").textContent));
    await page.waitForFunction(() => document.querySelectorAll("#budget .legend li").length >= 8);
    await page.waitForFunction(() => Number(document.querySelector("#memory .meter").getAttribute("aria-valuenow")) > 0);
    const glowing = await page.waitForFunction(() => {
      const canvas = document.querySelector("#atlas canvas");
      const { data } = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
      let hot = 0;
      for (let i = 0; i < data.length; i += 4) hot += data[i] > data[i + 2] + 60 ? 1 : 0;
      return hot > 20 && hot;
    });
    assert.ok(await glowing.jsonValue() > 20, "some experts glow");
    assert.match(await page.textContent("#atlas-text"), /layers of \d+ experts/);
    await page.keyboard.press("Escape");
    await idle(page);
  },

  async "a stopped answer's job ends"({ page }) {
    await ask(page, "Tell me everything about bridges. long", false);
    await grows(page);
    assert.ok(await running() > 0, "a job runs");
    await page.click("#send");
    await idle(page);
    const end = Date.now() + patience;
    while (await running() > 0) assert.ok(Date.now() < end, "the job goes on");
  },

  async "two conversations can be answered at once"({ page }) {
    await ask(page, "The first long tale", false);
    await grows(page);
    await page.keyboard.press("Control+k");
    await ask(page, "The second long tale", false);
    await grows(page);
    assert.equal(await page.locator("#chats .live").count(), 2);
    await page.keyboard.press("Escape");
    await idle(page);
    assert.equal(await page.locator("#chats .live").count(), 1);
    await page.click('#chats .chat:has-text("The first")');
    const n = await lengthOf(page);
    await grows(page, n);
    await page.keyboard.press("Escape");
    await idle(page);
  },

  async "a full storage loses nothing of this tab"({ page }) {
    await page.evaluate(() => { Storage.prototype.setItem = () => { throw new DOMException("full", "QuotaExceededError"); }; });
    await ask(page, "kept in memory", false);
    // Said when the message is to be kept, and gone again before a long answer ends.
    await page.waitForSelector('#toasts :text("storage is full")');
    await page.keyboard.press("Escape");
    await idle(page);
    await page.keyboard.press("Control+k");
    await page.click('#chats .chat:has-text("kept in memory")');
    assert.equal(await page.textContent(".user .bubble"), "kept in memory");
  },

  async "everything can be reached by keyboard alone"({ page }) {
    await page.keyboard.type("By keyboard");
    await page.keyboard.press("Shift+Enter");
    await page.keyboard.type("two lines");
    assert.equal(await page.inputValue("#prompt"), "By keyboard\ntwo lines");
    await page.keyboard.press("Enter");
    await page.waitForSelector('#send[aria-label="Stop"]');
    await idle(page);
    await page.keyboard.press("Control+k");
    assert.equal(await page.locator(".msg").count(), 0);
    assert.equal(await page.evaluate(() => document.activeElement.id), "prompt");
    await page.focus("#new");
    await page.keyboard.press("?");
    assert.match(await page.textContent("dialog"), /New conversation/);
    await page.keyboard.press("Escape");
    await page.waitForSelector("dialog", { state: "detached" });
    assert.equal(await page.evaluate(() => document.activeElement.id), "new", "focus goes back");
    await page.focus("#model");
    await page.keyboard.press("Enter");
    assert.equal(await page.evaluate(() => document.activeElement.getAttribute("role")), "menuitemradio");
    await page.keyboard.press("Escape");
    assert.equal(await page.evaluate(() => document.activeElement.id), "model");
    await page.keyboard.press("Control+.");
    assert.equal(await page.evaluate(() => document.activeElement.id), "system");
    await page.keyboard.press("Escape");
    await page.waitForSelector("dialog", { state: "detached" });
    await page.focus("#atlas canvas");
    await page.keyboard.press("ArrowRight");
    assert.match(await page.textContent("#tip"), /Layer 0, expert 0/);
  },
};

const forMock = {
  async "the phases of a wait are told, and a model is loaded"({ page }) {
    await page.click("#model");
    await page.click('[role="menuitemradio"]:has-text("gpt-oss-120b")');
    await page.waitForFunction(() => /Loading gpt-oss-120b… \d+ %/.test(document.querySelector("#model").textContent));
    await page.waitForFunction(() => document.querySelector("#model .name").textContent === "gpt-oss-120b");
    await ask(page, "queue and slow", false);
    await page.waitForFunction(() => /Queued, \d ahead/.test(document.querySelector(".wait")?.textContent));
    await page.waitForFunction(() => /Prefilling \d+ tokens · [\d.]+ s/.test(document.querySelector(".wait")?.textContent));
    await idle(page);
    assert.equal(mock.state.requests.at(-1).model, "gpt-oss-120b");
    await page.click("#model");
    await page.click('[role="menuitemradio"]:has-text("30b")');
    await page.waitForFunction(() => document.querySelector("#model .name").textContent === "qwen3-30b-a3b-q4");
  },

  async "Markdown while it streams is what it is when read at once"({ page }) {
    await ask(page, "torture");
    const streamed = await prose(page).evaluate((el) => el.innerHTML);
    await page.reload();
    await page.waitForSelector(".bot .prose table");
    assert.equal(await prose(page).evaluate((el) => el.innerHTML), streamed);
    const has = async (selector, text) => assert.match(await prose(page).locator(selector).first().textContent(), text, selector);
    await has("h1", /Every kind/);
    await has("strong", /^bold$/);
    await has("em", /^italic$/);
    await has("del", /^gone$/);
    await has("p code", /^code with <b>$/);
    await has("ol > li > ul > li > ol > li", /^deeper$/);
    await has("ol > li > .block code", /const x = "in a list";/);
    await has("blockquote blockquote", /a quote within/);
    await has("td:nth-child(1)", /^q4$/);
    await has("td.r strong", /8\.9 GB/);
    await has("math msup", /a2/);
    await has(".eq mfrac", /e/);
    await has(".block .k", /^const$/);
    await has(".add, .block .m", /Reads one expert/);
    const links = await prose(page).locator("a").evaluateAll((all) => all.map((a) => [a.getAttribute("href"), a.rel]));
    assert.deepEqual(links.map(([to]) => to), ["https://example.org/a_(b)", "https://example.org/path_with_underscores"]);
    assert.ok(links.every(([, rel]) => rel.includes("noopener")));
    const all = await prose(page).textContent();
    assert.match(all, /snake_case_names, 2 \* 3 \* 4 and \*no emphasis\*/);
    assert.match(all, /Prices of \$5 and \$6 stay/);
    assert.match(all, /#hashtag is not a heading/);
    assert.equal(await prose(page).locator("h1").count(), 1);
  },

  async "a long answer is not made anew for each token"({ page }) {
    await ask(page, "long", false);
    await grows(page, 900);
    await page.evaluate(() => {
      const el = [...document.querySelectorAll(".bot > .prose")].at(-1);
      window.firstBlock = el.firstElementChild;
      window.touched = 0;
      new MutationObserver((all) => {
        for (const one of all) if (window.firstBlock.contains(one.target) || [...one.removedNodes].length > 1) window.touched += 1;
      }).observe(el, { childList: true, subtree: true, characterData: true });
    });
    await grows(page, 1500);
    assert.equal(await page.evaluate(() => window.touched), 0);
    assert.ok(await page.evaluate(() => window.firstBlock.isConnected));
    await page.keyboard.press("Escape");
    await idle(page);
  },

  async "stopping closes the connection"({ page }) {
    const before = mock.state.cancelled;
    await ask(page, "long", false);
    await grows(page);
    await page.click("#send");
    await idle(page);
    for (let tries = 0; mock.state.cancelled === before && tries < 200; tries++) await new Promise(setImmediate);
    assert.equal(mock.state.cancelled, before + 1);
  },

  async "hostile text stays text"({ page }) {
    await ask(page, 'xss <img src=x onerror="window.pwned=20">');
    const found = await page.evaluate(() => ({
      pwned: window.pwned ?? null,
      alive: document.querySelectorAll("#log :is(img, script, iframe, object, embed, form[action], style)").length,
      links: [...document.querySelectorAll("#log a")].map((a) => a.protocol),
      handlers: [...document.querySelectorAll("#log *")].filter((el) => [...el.attributes].some((at) => at.name.startsWith("on"))).length,
    }));
    assert.deepEqual(found, { pwned: null, alive: 0, links: ["https:", "https:"], handlers: 0 });
    await page.hover("#log a >> nth=-1");
    assert.equal(await page.evaluate(() => window.pwned ?? null), null);
    assert.match(await page.textContent("#chats .chat"), /<img src=x/);
  },

  async "reasoning is folded"({ page }) {
    await ask(page, "think");
    const fold = page.locator(".think");
    assert.equal(await fold.getAttribute("open"), null);
    assert.match(await fold.locator("summary").textContent(), /Thought for [\d.]+ s · \d+ words/);
    await fold.locator("summary").click();
    assert.equal(await fold.locator("strong").textContent(), "what is asked");
  },

  async "a tool call is folded, its result typed in and sent back"({ page }) {
    await page.keyboard.press("Control+.");
    await page.check("#use-tools");
    await page.fill("#system", "Be brief.");
    await page.click('dialog .btn:has-text("Done")');
    await ask(page, "tool");
    assert.equal(mock.state.requests.at(-1).tools[0].function.name, "get_weather");
    assert.equal(mock.state.requests.at(-1).messages[0].content, "Be brief.");
    assert.match(await page.textContent(".calls .fold summary"), /get_weather/);
    assert.match(await page.textContent(".calls pre"), /"city": "Lisbon"/);
    await page.fill(".calls textarea", "rain");
    await page.click('.calls .btn:has-text("Send result")');
    await page.waitForFunction(() => /The tool said: rain/.test(document.querySelector("#log").textContent));
    await idle(page);
    const sent = mock.state.requests.at(-1).messages;
    assert.deepEqual(sent.slice(-2), [
      {
        role: "assistant", content: "Let me look that up.",
        tool_calls: [{ id: "call_1", type: "function", function: { name: "get_weather", arguments: '{"city":"Lisbon","unit":"c"}' } }],
      },
      { role: "tool", tool_call_id: "call_1", content: "rain" },
    ]);
    assert.equal(await page.locator(".calls details[open]").count(), 0);
  },

  async "sampling is sent only where it was set"({ page }) {
    await ask(page, "plain");
    assert.ok(!("temperature" in mock.state.requests.at(-1)) && !("seed" in mock.state.requests.at(-1)));
    await page.keyboard.press("Control+.");
    await page.fill("#k-temperature", "0.3");
    await page.fill("#k-seed", "7");
    await page.fill("#k-top_p", "3");
    assert.equal(await page.getAttribute("#k-top_p", "aria-invalid"), "true");
    await page.keyboard.press("Escape");
    await ask(page, "set");
    const { temperature, seed, top_p, stream_options } = mock.state.requests.at(-1);
    assert.deepEqual({ temperature, seed, top_p, stream_options }, { temperature: 0.3, seed: 7, top_p: undefined, stream_options: { include_usage: true } });
    await page.reload();
    assert.match(await page.textContent("#settings"), /Temperature 0.3/);
    await page.keyboard.press("Control+k");
    await ask(page, "new ones begin with them");
    assert.equal(mock.state.requests.at(-1).seed, 7);
    await page.keyboard.press("Control+.");
    await page.click('dialog .btn:has-text("defaults")');
    await page.keyboard.press("Escape");
    await page.click('#chats .chat:has-text("plain")');
    await ask(page, "the old one keeps its own");
    assert.equal(mock.state.requests.at(-1).seed, 7);
  },

  async "at the context's wall it asks which turns to leave out"({ page }) {
    await ask(page, "first turn");
    await ask(page, "second turn");
    await page.fill("#prompt", "third, wall");
    await page.keyboard.press("Enter");
    await page.waitForSelector("dialog .turns");
    await shoot(page, "wall");
    assert.match(await page.textContent("dialog"), /43,120 tokens/);
    assert.match(await page.textContent("dialog .turns .go"), /first turn/);
    await page.click('dialog .btn.main');
    await page.waitForFunction(() => /You said: third, wall/.test(document.querySelector("#log").textContent));
    await idle(page);
    const sent = mock.state.requests.at(-1).messages;
    assert.ok(sent.length < 4 && sent.at(-1).content === "third, wall");
    assert.match(await page.textContent(".cut"), /no longer sent/);
    assert.equal(await page.locator(".user").count(), 3, "what is left out is still shown");
    await page.click(".cut .link");
    assert.equal(await page.locator(".cut").count(), 0);
  },

  async "the context meter warns before the wall"({ page }) {
    await ask(page, "plain");
    assert.equal(await page.getAttribute("#context", "class"), "num");
    await ask(page, "nearly full");
    assert.match(await page.getAttribute("#context", "class"), /warn/);
    assert.match(await page.textContent("#context"), /context 90 % full/);
  },

  async "failures are said, and can be tried again"({ page }) {
    await ask(page, "broken");
    assert.match(await page.textContent(".note.bad"), /Experts.smoe: layer 12, expert 87: checksum/);
    assert.match(await prose(page).textContent(), /This will not end well/);
    await page.click('.note.bad .btn:has-text("Try again")');
    await idle(page);
    assert.match(await page.textContent(".bot .acts"), /2 \/ 2/);
    await ask(page, "cut");
    assert.match(await page.locator(".note.bad").last().textContent(), /ended before/);
  },

  async "a key is asked for only when the server wants one"({ page }) {
    assert.equal(await page.locator("dialog").count(), 0);
    mock.state.key = "sesame";
    try {
      await page.fill("#prompt", "with a key");
      await page.keyboard.press("Enter");
      await page.fill("#api-key", "sesame");
      await page.click('dialog .btn:has-text("Use key")');
      await page.waitForFunction(() => /You said: with a key/.test(document.querySelector("#log").textContent));
      await idle(page);
    } finally {
      mock.state.key = null;
    }
  },
};

const looks = {
  async "it fits a phone, and its drawers open and shut"() {
    const { context, page, faults } = await open({ viewport: { width: 360, height: 740 }, hasTouch: true, isMobile: true });
    await shoot(page, "phone-empty");
    await ask(page, real ? "Say hello" : "torture");
    const over = await page.evaluate(() => document.documentElement.scrollWidth - innerWidth);
    assert.ok(over <= 0, `${over} pixels too wide`);
    await page.click("#open-side");
    assert.ok(await page.locator("#chats .chat").first().isVisible());
    assert.ok(await page.evaluate(() => document.querySelector("#main").inert));
    await page.keyboard.press("Escape");
    assert.ok(await page.locator("#side").isHidden());
    await page.click("#open-panel");
    assert.ok(await page.locator("#budget").isVisible());
    await page.click("#shut-panel");
    assert.deepEqual(faults, []);
    await context.close();
  },

  async "pictures of each look"() {
    for (const [name, options] of [
      ["light", {}], ["dark", { colorScheme: "dark" }],
      ["phone", { viewport: { width: 390, height: 844 }, isMobile: true, hasTouch: true, deviceScaleFactor: 2 }],
      ["phone-dark", { viewport: { width: 390, height: 844 }, isMobile: true, hasTouch: true, deviceScaleFactor: 2, colorScheme: "dark" }],
    ]) {
      const { context, page } = await open(options);
      await page.waitForSelector("#state:not(:has-text('connecting'))", { state: "attached" });
      await shoot(page, `${name}-empty`);
      await ask(page, "torture");
      await shoot(page, `${name}-end`);
      await page.evaluate(() => { document.querySelector("#scroll").scrollTop = 0; });
      await shoot(page, `${name}-top`);
      await ask(page, "And now a long one, please: how does the cache decide?", false);
      await grows(page, 700);
      await shoot(page, `${name}-streaming`);
      if (name.startsWith("phone")) {
        await page.click("#open-panel");
        await page.waitForFunction(() => document.querySelectorAll("#budget .legend li").length >= 8);
        await shoot(page, `${name}-panel`);
        await page.click("#shut-panel");
        await page.click("#open-side");
        await shoot(page, `${name}-side`);
        await page.keyboard.press("Escape");
      } else {
        await page.click("#atlas button");
        await page.waitForSelector("dialog.big canvas");
        await shoot(page, `${name}-atlas`);
        await page.keyboard.press("Escape");
        await page.click("#model");
        await shoot(page, `${name}-models`);
        await page.keyboard.press("Escape");
      }
      await page.keyboard.press("Escape");
      await idle(page);
      await ask(page, "tool");
      await shoot(page, `${name}-tool`);
      await page.click('.calls .btn:has-text("Not available")');
      await idle(page);
      await page.click("#settings");
      await shoot(page, `${name}-settings`);
      await page.keyboard.press("Escape");
      await ask(page, "queue slow think", false);
      await page.waitForFunction(() => /Prefilling/.test([...document.querySelectorAll(".wait")].at(-1)?.textContent));
      await shoot(page, `${name}-wait`);
      await context.close();
    }
  },
};

const needsMock = new Set([...Object.values(forMock), looks["pictures of each look"]]);
let failed = 0;
const only = process.env.ONLY ?? "";
for (const [name, check] of [...Object.entries(forAny), ...Object.entries(forMock), ...Object.entries(looks)]) {
  if (!name.includes(only) || (name.startsWith("pictures") && !shots)) continue;
  if (real && needsMock.has(check)) {
    process.stdout.write(`mock  ${name}: needs certain answers\n`);
    continue;
  }
  let context = null;
  try {
    if (Object.values(looks).includes(check)) {
      await check();
    } else {
      const opened = await open();
      ({ context } = opened);
      await check(opened);
      assert.deepEqual(opened.faults, [], "no errors in the console, no requests outside");
    }
    process.stdout.write(`ok    ${name}\n`);
  } catch (error) {
    failed += 1;
    process.stdout.write(`FAIL  ${name}\n${error.stack}\n`);
    if (context?.pages().length) await shoot(context.pages()[0], `fail-${failed}`);
  }
  await context?.close();
}
await browser.close();
mock?.close();
process.stdout.write(failed ? `${failed} failed\n` : real ? "all hold that can be asked of any model\n" : "all hold\n");
process.exit(failed ? 1 : 0);
