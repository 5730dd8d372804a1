"""Renders the cases below with Jinja2 set up as `transformers` sets it up, and writes cases.json.

    python3 -m venv venv && venv/bin/pip install jinja2==3.1.6 && venv/bin/python reference.py

Each case is a template; all see the same variables. The Rust test `jinja.rs` must render the same text, or fail
where the reference fails.
"""

import datetime
import json
import pathlib

import jinja2
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

NOW = datetime.datetime(2026, 1, 2, 3, 4, 5)

VARIABLES = json.loads(r"""
{
  "none": null, "yes": true, "no": false, "zero": 0, "one": 1, "big": 12345678901234567, "neg": -7,
  "f": 1.0, "pi": 3.14159, "tiny": 0.00001, "huge": 1e20, "half": 2.5,
  "s": "Hello, World", "empty": "", "uni": "naïve 漢字 🎨\u200d x", "html": "<b> & 'q' \"d\" </b>",
  "ws": "  \t two  words \n ", "lines": "a\nb\r\nc\n\nd", "quote": "it's", "both": "'\"",
  "xs": [3, 1, 2], "mixed": [1, "a", null, true, 2.0, {"k": "v"}, [1]], "names": ["b", "A", "c"],
  "d": {"z": 1, "a": [1, 2], "m": {"n": null}}, "clash": {"items": 1, "keys": 2, "get": 3, "values": 4},
  "nest": {"a": {"b": {"c": "deep"}}},
  "users": [{"n": "x", "age": 3, "on": true}, {"n": "y", "age": 1, "on": false}, {"n": "z", "age": 2}],
  "msgs": [{"role": "system", "content": "S"}, {"role": "user", "content": "U"},
           {"role": "assistant", "content": null, "tool_calls": [{"function": {"name": "f", "arguments": {"x": 1.5, "y": "é"}}}]},
           {"role": "tool", "content": "T"}]
}
""")

CASES = r"""
# Printing
{{ none }}|{{ yes }}|{{ no }}|{{ one }}|{{ neg }}|{{ big }}
{{ f }}|{{ pi }}|{{ tiny }}|{{ huge }}|{{ half }}
{{ xs }}|{{ mixed }}
{{ d }}
{{ uni }}|{{ [uni] }}
{{ [quote, both, html, ws] }}
{{ (1, 2) }}|{{ (1,) }}|{{ () }}
{{ missing }}|{{ [missing] }}
{{ msgs[1:3] }}
{{ none ~ yes ~ 1 ~ half ~ xs ~ d.m }}
{{ none | string }}|{{ huge | string }}|{{ tiny | string | length }}
{{ 1e3 }}|{{ 1_000 }}|{{ 0x1f }}|{{ 0b11 }}|{{ 0o17 }}
{{ "a" "b" 'c' }}
{{ 'tab\tnl\nq\'b\\u\u00e9\x41' }}
{{ huge ~ tiny }}
# Arithmetic and comparison
{{ 7 // 2 }}|{{ -7 // 2 }}|{{ 7 % 3 }}|{{ -7 % 3 }}|{{ 7 / 2 }}|{{ 6 / 2 }}|{{ 2 ** 10 }}|{{ 2 ** -1 }}|{{ 7.5 // 2 }}
{{ "ab" * 3 }}|{{ 3 * "ab" }}|{{ "-" * 0 }}|{{ "-" * -1 }}|{{ [1] * 2 }}
{{ 1 + 1.0 }}|{{ yes + 1 }}|{{ xs + [4] }}|{{ "a" + "b" }}
{{ 1 == 1.0 }}|{{ yes == 1 }}|{{ "1" == 1 }}|{{ none == no }}|{{ [1] == [1] }}|{{ (1,) == [1] }}|{{ missing == missing }}|{{ missing == none }}
{{ 1 < 2 < 3 }}|{{ 3 > 2 > 2 }}|{{ "a" < "b" }}|{{ [1, 2] < [1, 3] }}
{{ "a" + 1 }}
{{ none + 1 }}
{{ missing + "a" }}
{{ "a" ~ missing }}
{{ -half }}|{{ not none }}
{{ +one }}
{{ 1 if yes }}|{{ 1 if no }}|{{ 1 if no else 2 }}
{{ none or "x" }}|{{ "" or 0 or [] }}|{{ 1 and "y" }}|{{ 0 and 1 }}
{{ big * big }}
{{ 1 in xs }}|{{ 9 not in xs }}|{{ "z" in d }}|{{ "ell" in s }}|{{ "" in s }}|{{ none in mixed }}
{{ "a" in none }}
{{ "a" in missing }}
{{ 1 / 0 }}
# Lookup
{{ d.z }}|{{ d["z"] }}|{{ d.nope }}|{{ d["nope"] }}|{{ d.m.n }}|{{ d.nope is defined }}
{{ d.nope.deeper }}
{{ missing.x }}
{{ none.x }}|{{ none["x"] }}|{{ s.nope }}|{{ one.nope }}
{{ xs[0] }}|{{ xs[-1] }}|{{ xs[9] }}|{{ xs["a"] }}|{{ s[0] }}|{{ s[-1] }}|{{ s[99] }}
{{ xs.0 }}|{{ nest.a.b.c }}|{{ nest["a"].b["c"] }}
{{ clash["items"] }}|{{ clash.items() | list }}|{{ clash.keys() | list }}|{{ clash.get("get") }}
{{ clash.get("nope") }}|{{ clash.get("nope", 5) }}|{{ clash.get("nope", default) }}
{% for k, v in clash.items() %}{{ k }}={{ v }};{% endfor %}
{{ clash.values() | list }}|{{ clash | length }}
# Slices
{{ xs[1:] }}|{{ xs[:-1] }}|{{ xs[::-1] }}|{{ xs[::2] }}|{{ xs[5:] }}|{{ xs[-2:] }}|{{ xs[:0] }}|{{ xs[2:0:-1] }}
{{ s[1:5] }}|{{ s[::-1] }}|{{ s[-3:] }}|{{ s[:-7] }}|{{ uni[6:9] }}|{{ s[::3] }}
{% for m in msgs[1:] %}{{ loop.index }}{{ m.role }}{% endfor %}|{{ msgs[::-1][0].role }}|{{ msgs[1:] | length }}|{{ msgs[1:][0].role }}
{{ msgs[1:] is sequence }}|{{ msgs[1:] is iterable }}|{{ msgs[1:] is string }}|{{ msgs[1:] is mapping }}
{{ (xs[1:] + [9]) }}|{{ xs[1:] == [1, 2] }}|{{ 2 in xs[1:] }}
{{ none[1:] }}
# Tests
{{ s is string }}|{{ one is string }}|{{ none is string }}|{{ xs is string }}|{{ missing is string }}
{{ s is mapping }}|{{ d is mapping }}|{{ xs is mapping }}
{{ s is iterable }}|{{ d is iterable }}|{{ xs is iterable }}|{{ none is iterable }}|{{ one is iterable }}|{{ missing is iterable }}
{{ s is sequence }}|{{ d is sequence }}|{{ xs is sequence }}|{{ none is sequence }}|{{ one is sequence }}|{{ missing is sequence }}|{{ (1,) is sequence }}|{{ range(3) is sequence }}
{{ one is number }}|{{ f is number }}|{{ yes is number }}|{{ s is number }}|{{ one is integer }}|{{ yes is integer }}|{{ f is float }}|{{ one is float }}|{{ yes is boolean }}|{{ one is boolean }}
{{ yes is true }}|{{ one is true }}|{{ no is false }}|{{ zero is false }}|{{ none is none }}|{{ missing is none }}|{{ missing is undefined }}|{{ none is defined }}
{{ 3 is odd }}|{{ 4 is even }}|{{ 9 is divisibleby 3 }}|{{ 1 is eq 1 }}|{{ 1 is ne 1 }}|{{ 2 is gt 1 }}|{{ 2 is in xs }}|{{ "a" is lower }}|{{ "A" is upper }}|{{ none is sameas none }}
{{ xs is not string }}|{{ not xs is string }}|{{ range is callable }}|{{ s is callable }}
{{ one is nosuchtest }}
# String methods
[{{ ws.strip() }}]|[{{ ws.lstrip() }}]|[{{ ws.rstrip() }}]
{{ "xxaxbxx".strip("x") }}|{{ "abcab".strip("ab") }}|{{ "\n\nx\n".lstrip("\n") }}|{{ "a\n".rstrip("\n") }}|{{ "a".strip(none) }}
{{ "a,b,,c".split(",") }}|{{ ws.split() }}|{{ "a b  c ".split(none, 1) }}|{{ "a,b,c".split(",", 1) }}|{{ "".split() }}|{{ "".split(",") }}|{{ "a--b".split("--")[-1] }}
{{ "a,b,c".split(sep=",", maxsplit=1) }}|{{ "a,b,c".rsplit(",", 1) }}|{{ " a b  c ".rsplit() }}|{{ " a b  c ".rsplit(none, 1) }}|{{ "abc".split("") }}
{{ "  a  b  ".split(none, 0) }}|{{ "  a  b  ".rsplit(none, 0) }}|{{ "a\u001cb".split() }}
{{ lines.splitlines() }}|{{ lines.splitlines(true) }}|{{ lines.splitlines(keepends=True) }}|{{ "a\u2028b\x0bc".splitlines() }}
{{ "a</think>b</think>c".split("</think>")[0].rstrip("\n").split("<think>")[-1].lstrip("\n") }}
{{ "k=v=w".partition("=") }}|{{ "k=v=w".rpartition("=") }}|{{ "k".partition("=") }}|{{ "k".rpartition("=") }}
{{ s.startswith("Hell") }}|{{ s.startswith(("x", "H")) }}|{{ s.endswith("ld") }}|{{ s.endswith(("x", "ld")) }}
{{ s.upper() }}|{{ s.lower() }}|{{ "they're bill's x9y".title() }}|{{ "hELLO wORLD".capitalize() }}|{{ "aBc".swapcase() }}|{{ "ß".upper() }}
{{ s.replace("l", "L") }}|{{ s.replace("l", "L", 1) }}|{{ "aaa".replace("a", "") }}|{{ "ab".replace("", "-") }}
{{ s.find("o") }}|{{ s.find("zz") }}|{{ s.rfind("o") }}|{{ s.index("W") }}|{{ s.count("l") }}|{{ s.find("o", 5) }}|{{ s.find("o", 0, 3) }}|{{ uni.find("漢") }}|{{ s.count("l", 4) }}|{{ s.rfind("o", 0, -5) }}
{{ s.index("zz") }}
{{ ",".join(["a", "b"]) }}|{{ ",".join(d) }}|{{ ", ".join(names[1:]) }}|{{ "-".join("abc") }}
{{ ",".join([1, 2]) }}
{{ "5".zfill(3) }}|{{ "-5".zfill(4) }}|{{ "+5".zfill(4) }}|{{ "12345".zfill(3) }}|{{ "a".ljust(3, ".") }}|{{ "a".rjust(3) }}|{{ "ab".center(5, "*") }}|{{ "abc".center(6, "*") }}|{{ "a".center(4, "*") }}
{{ "prefix-x".removeprefix("prefix-") }}|{{ "x.txt".removesuffix(".txt") }}|{{ "x".removeprefix("y") }}
{{ "12".isdigit() }}|{{ "1a".isdigit() }}|{{ "ab".isalpha() }}|{{ "a1".isalnum() }}|{{ " ".isspace() }}|{{ "".isspace() }}|{{ "AB".isupper() }}|{{ "ab".islower() }}|{{ "".isdigit() }}
{{ "{} is {}".format("a", 1) }}|{{ "{0}{1}{0}".format("a", "b") }}|{{ "{x:>4}|{y:.2f}".format(x=1, y=half) }}
{{ s.nosuch() }}
{{ none.strip() }}
{{ missing.strip() }}
{{ one.strip() }}
# List and dict methods
{{ xs.index(1) }}|{{ xs.count(1) }}|{{ d.get("z") }}|{{ d.get("q") is none }}|{{ d.keys() | join(",") }}|{{ d.items() | length }}
{{ xs.append(4) }}
{{ d.update({"q": 1}) }}
{{ d.pop("z") }}
{{ "z" in d.keys() }}|{{ 1 in d.values() }}|{{ d.items() | list }}|{{ d.keys() | list | length }}
{{ {"a": 1, "b": {"c": [1, 2]}} }}|{{ dict(a=1) }}|{{ {"a": 1}["a"] }}|{{ {1: 2}[1] }}|{{ {} }}
# tojson
{{ d | tojson }}|{{ mixed | tojson }}|{{ s | tojson }}|{{ none | tojson }}|{{ yes | tojson }}|{{ half | tojson }}|{{ f | tojson }}
{{ html | tojson }}|{{ uni | tojson }}|{{ uni | tojson(ensure_ascii=true) }}|{{ "\u007f\u0001\b\f" | tojson }}
{{ d | tojson(indent=2) }}
{{ {} | tojson(indent=2) }}|{{ [] | tojson(indent=2) }}|{{ {"a": {}, "b": []} | tojson(indent=4) }}
{{ d | tojson(separators=(",", ":")) }}|{{ d | tojson(sort_keys=true) }}|{{ d | tojson(indent=1, sort_keys=true, separators=(";", "=")) }}
{{ {1: "a", none: "b", yes: "c", half: "d"} | tojson }}|{{ huge | tojson }}|{{ tiny | tojson }}|{{ big | tojson }}
{{ msgs[2].tool_calls[0].function.arguments | tojson }}|{{ msgs[1:3] | tojson }}|{{ (1, "a") | tojson }}
{{ missing | tojson }}
{{ range | tojson }}
{{ d | tojson(true) }}|{{ uni | tojson(true) }}|{{ xs | tojson(false, 1) }}
{{ xs | tojson(indent="--") }}|{{ xs | tojson(indent=0) }}|{{ xs | tojson(indent=none) }}
# Filters
{{ "" | default("x") }}|{{ "" | default("x", true) }}|{{ missing | default("x") }}|{{ none | default("x") }}|{{ none | d("x", true) }}|{{ missing | default }}
{{ ws | trim }}|{{ "xax" | trim("x") }}|{{ s | length }}|{{ d | length }}|{{ missing | length }}|{{ s | count }}
{{ none | length }}
{{ xs | join }}|{{ xs | join("-") }}|{{ mixed | join("|") }}|{{ users | join(",", attribute="n") }}|{{ missing | join }}
{{ xs | first }}|{{ xs | last }}|{{ [] | first }}|{{ s | first }}|{{ xs | sort }}|{{ names | sort }}|{{ names | sort(case_sensitive=true) }}|{{ xs | sort(reverse=true) }}|{{ users | sort(attribute="age") | map(attribute="n") | join }}
{{ xs | reverse | list }}|{{ s | reverse }}|{{ xs | sum }}|{{ users | sum(attribute="age") }}|{{ xs | min }}|{{ xs | max }}|{{ [1, 1, 2] | unique | list }}
{{ users | selectattr("on") | map(attribute="n") | list }}|{{ users | rejectattr("on") | map(attribute="n") | list }}|{{ users | selectattr("n", "equalto", "y") | list | length }}|{{ users | selectattr("on", "defined") | list | length }}
{{ xs | select("odd") | list }}|{{ xs | reject("odd") | list }}|{{ names | map("upper") | list }}|{{ users | map(attribute="q", default="-") | join }}
{{ s | upper }}|{{ s | lower }}|{{ "foo bar" | title }}|{{ "foo BAR" | capitalize }}|{{ "aXbX" | replace("X", "-") }}|{{ "aXbX" | replace("X", "-", 1) }}
{{ "3" | int }}|{{ "x" | int }}|{{ "x" | int(5) }}|{{ 3.9 | int }}|{{ "3.5" | float }}|{{ "x" | float }}|{{ one | float }}|{{ 2.567 | round(1) }}|{{ 2.5 | round }}|{{ 3 | round }}|{{ 2.1 | round(0, "ceil") | int }}|{{ -3 | abs }}
{{ "0x1f" | int(0, 16) }}|{{ "ff" | int(base=16) }}|{{ " 1_0 " | int }}|{{ "-3.9" | int }}|{{ yes | int }}|{{ none | int }}|{{ xs | int }}|{{ yes | float }}|{{ none | float(2.5) }}|{{ "1e3" | int }}|{{ "+-3" | int }}
{{ d | items | list }}|{{ missing | items | list }}|{{ d | dictsort }}|{{ d | list }}|{{ "abc" | list }}|{{ (1, 2) | list }}
{{ "a\nb\n\nc" | indent }}|{{ "a\nb" | indent(2, true) }}|{{ "a\n\nb" | indent(width=1, blank=true) }}|{{ "a\nb" | indent("> ") }}
{{ html | e }}|{{ html | escape }}|{{ html | safe }}|{{ html | forceescape }}
{{ xs | batch(2) | list }}|{{ xs | slice(2) | list }}|{{ users | groupby("age") | map("first") | list }}
{{ "%s-%d" | format("a", 3) }}|{{ "a b c" | wordcount }}|{{ "x" | center(5) }}|{{ "hello big world" | truncate(9) }}|{{ "hello big world" | truncate(9, true, "~", 0) }}|{{ "short" | truncate(3) }}|{{ "<p>a</p>" | striptags }}|{{ 1000 | filesizeformat }}
{{ d | attr("z") }}
{{ none | upper }}|{{ one | string + "x" }}|{{ yes | string }}|{{ xs | string }}
{{ one | nosuchfilter }}
{{ "a b&c/d" | urlencode }}
{{ xs | map("string") | join(",") }}|{{ xs | pprint }}
{{ missing | int(7) }}
{{ "a" | safe + "<" }}|{{ "a" | safe ~ "<" }}
# Statements
{% for x in xs %}{{ loop.index }}{{ loop.index0 }}{{ loop.first }}{{ loop.last }}{{ loop.length }}{{ loop.revindex }}{{ loop.previtem }}{{ loop.nextitem }};{% endfor %}
{% for x in xs %}{% if x == 1 %}{% continue %}{% endif %}{{ x }}{% endfor %}|{% for x in xs %}{% if x == 1 %}{% break %}{% endif %}{{ x }}{% endfor %}
{% for x in [] %}a{% else %}b{% endfor %}|{% for x in missing %}a{% else %}b{% endfor %}|{% for x in xs if x > 1 %}{{ x }}{{ loop.length }}{% endfor %}
{% for k in d %}{{ k }}{% endfor %}|{% for c in "ab" %}[{{ c }}]{% endfor %}|{% for k, v in d | dictsort %}{{ k }}{% endfor %}|{% for k, v in d | items %}{{ k }}{% endfor %}
{% for x in xs %}{{ loop.cycle("a", "b") }}{{ loop.changed(x) }}{% endfor %}
{% set x = 1 %}{% for i in xs %}{% set x = i %}{% endfor %}{{ x }}|{% if yes %}{% set y = 2 %}{% endif %}{{ y }}
{% set ns = namespace(a=1, b="x") %}{% for i in xs %}{% set ns.a = ns.a + i %}{% endfor %}{{ ns.a }}{{ ns.b }}{{ ns.c }}
{% set a, b = 1, 2 %}{{ a }}{{ b }}|{% set c %}block {{ a }}{% endset %}{{ c }}|{% set (p, q) = [3, 4] %}{{ p }}{{ q }}
{% macro m(a, b=2) %}{{ a }}{{ b }}{% endmacro %}{{ m(1) }}|{{ m(1, b=3) }}|{{ m(b=1) }}|{{ m() }}
{% macro m(a, c=a) %}{{ a }}{{ c }}{% endmacro %}{{ m(1) }}
{% macro m(a) %}{{ varargs }}{{ kwargs }}{% endmacro %}{{ m(1, 2, k=3) }}
{% macro m() %}[{{ caller("x") }}]{% endmacro %}{% call(v) m() %}got {{ v }}{% endcall %}
{% macro m() %}{{ later }}{% endmacro %}{% set later = 1 %}{{ m() }}
{% macro r(n) %}{{ n }}{% if n > 0 %}{{ r(n - 1) }}{% endif %}{% endmacro %}{{ r(3) }}|{{ r(2) | upper }}|{% set t = r(1) %}{{ t }}{{ t | length }}{{ t is string }}
{% macro m() %}  padded {% endmacro %}[{{ m() | trim }}][{{ m().strip() }}]
{% with a = 1, b = 2 %}{{ a + b }}{% endwith %}{{ a is defined }}
{% filter upper %}abc{{ s }}{% endfilter %}
{% if none %}a{% elif zero %}b{% elif "" %}c{% elif [] %}d{% elif {} %}e{% elif missing %}f{% else %}g{% endif %}
{# comment #}a{#- trimmed -#} b
a  {%- if yes -%}  b  {%- endif -%}  c
a {{- " b " -}} c
{% raw %}{{ not }} {% rendered %}{% endraw %}
{% generation %}inside {{ s }}{% set inner = 1 %}{% endgeneration %}{{ inner is defined }}
{%- generation -%} x {%- endgeneration -%} y
{% for m in msgs %}{%- if m.role == "assistant" %}{% generation %}{{ m.content }}{% endgeneration %}{% endif %}{% endfor %}
{{ raise_exception("no " ~ s) }}
{{ raise_exception(none) }}
{% if no %}{{ raise_exception("x") }}{% endif %}ok
{{ strftime_now("%d %B %Y %H:%M") }}|{{ strftime_now("%-d/%-m/%y %A %j") }}|{{ strftime_now is defined }}
{{ range(3) | list }}|{{ range(1, 7, 2) | list }}|{{ range(3, 0, -1) | list }}|{{ range(3)[1] }}|{{ range(3) | length }}
{{ tools }}|{{ tools is defined }}|{{ tools is none }}|{{ documents }}|{{ documents is defined }}|{{ bos_token is defined }}|{{ add_generation_prompt }}
{{ nosuchfunction() }}
{% set loop_messages = messages %}{{ loop_messages }}
{% for x in none %}a{% endfor %}
{% for u in users %}{{ u.n }}{% if not loop.last %}, {% endif %}{% endfor %}
{% for x in xs recursive %}{{ x }}{% if x == 3 %}{{ loop([7]) }}{% endif %}{% endfor %}
{% set x = joiner(",") %}{{ x() }}a{{ x() }}b|{% set c = cycler("o", "e") %}{{ c.next() }}{{ c.next() }}{{ c.next() }}
{{ debug is defined }}
{% block b %}in block{% endblock %}
{% do xs %}
{% if (msgs | selectattr("role", "equalto", "user") | list | length) == 1 %}one user{% endif %}
{% set content = msgs[2].content %}{{ content if content is not none else "" }}|{{ (content or "") + "x" }}
{{ msgs | map(attribute="role") | list }}|{{ (msgs | last).role }}|{{ msgs[-1]["role"] == "tool" }}
{% set ns = namespace(last=-1) %}{% for m in msgs %}{% if m.role == "user" %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}{{ ns.last }}
{%- for m in msgs[::-1] %}{% set index = (msgs | length - 1) - loop.index0 %}{{ index }}{{ m.role }} {% endfor %}
{{ {"a": 1} | tojson }}{% set m = {"role": "x"} %}{{ m.role }}{{ m["role"] }}
{{ xs is defined and xs | length > 2 }}|{{ xs | length > 2 and not no }}
{{ s if s is defined and s is not none else "n" }}
{{ d.a[0] }}|{{ d["a"][-1] }}|{{ d.a | length }}|{{ d.a.0 }}
{{ (1, 2)[0] }}|{{ [1, 2, 3][1:] }}|{{ "abc"[1] }}
{{ "a" if 1 else "b" ~ "c" }}|{{ ("a" if 0 else "b") ~ "c" }}
{{ 1 ~ 2 }}|{{ 1 ~ 2 * 3 }}|{{ "x" ~ 1 + 2 }}|{{ -1 | abs }}|{{ 2 ** 3 ** 2 }}|{{ not 1 == 2 }}
{{ namespace(a=1).a }}|{{ dict(d, q=2) | length }}
{{ loop is defined }}
# A statement's line break and indentation
"""

BLOCKS = [
    "a\n{% if yes %}\n  b\n{% endif %}\nc\n",
    "  {% if yes %}\n    x\n  {% endif %}\n  y\n\n",
    "\n{{ s }}\n\n{{ s }}\n",
    "x\r\n{% if yes %}\r\ny\r\n{% endif %}\r\n",
    "  {#- c -#}\n  a\n  {# c #}\n  b\n",
    "{%+ if yes %} a {%+ endif %}\n b {% if yes +%}\n c {% endif %}",
    "    {%- for x in xs %}\n        {{- x }}\n    {%- endfor %}\nend",
    "{{ s\n}}{% set x = [\n 1,\n 2,\n] %}{{ x }}{{ {\n'a': 1,\n} }}",
    "a\n\n",
    "{% for m in msgs %}\n<{{ m.role }}>\n{% endfor %}\n",
    "{% macro f(x) %}\n  [{{ x }}]\n{% endmacro %}\n{{ f(1) }}\n{{ f(2) -}}\n z",
    "\ta\n\t{% if yes %}b{% endif %}\n",
    "{% set q %}\n  text\n{% endset %}\n[{{ q }}]",
    "  {% generation %}\n  x\n  {% endgeneration %}\n  y",
]


class AssistantTracker(Extension):
    """The `generation` tag of transformers, without its bookkeeping."""

    tags = {"generation"}

    def parse(self, parser):
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        call = self.call_method("_render")
        return jinja2.nodes.CallBlock(call, [], [], body).set_lineno(line)

    @jinja2.pass_eval_context
    def _render(self, _context, caller):
        return caller()


def raise_exception(message):
    raise jinja2.exceptions.TemplateError(message)


def tojson(x, ensure_ascii=False, indent=None, separators=None, sort_keys=False):
    return json.dumps(x, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def environment():
    env = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[AssistantTracker, loopcontrols]
    )
    env.filters["tojson"] = tojson
    env.globals["raise_exception"] = raise_exception
    env.globals["strftime_now"] = lambda form: NOW.strftime(form)
    return env


def main():
    env = environment()
    sources = [line for line in CASES.strip().split("\n") if not line.startswith("# ")] + BLOCKS
    cases = []
    for source in sources:
        case = {"template": source}
        try:
            given = dict(VARIABLES, messages=[], tools=None, documents=None, add_generation_prompt=True)
            case["text"] = env.from_string(source).render(**given)
        except Exception as error:
            case["error"] = f"{type(error).__name__}: {error}"
        cases.append(case)
    out = {"strftime_now": str(NOW), "variables": VARIABLES, "cases": cases}
    path = pathlib.Path(__file__).with_name("cases.json")
    path.write_text(json.dumps(out, indent=1, ensure_ascii=False) + "\n")


main()
