"""Many clients of every kind of manners for a while; then nothing must be left of them.

    python soak.py PID [--clients 200] [--seconds 60]          BASE_URL and MODEL from the environment

Clients ask, stream, hang up at random moments, close their sending half, read slowly, send half a request, or nothing.
Every answered request must end as it should, what the queue has no room for must be told 429 with Retry-After, and eight
clients at once must get the tokens that each gets alone. Who closes the sending half counts as gone (it cannot be told
from a connection that was closed), so its answer may break off anywhere; but then it must not look complete. At the end
no job runs, no block of the KV cache is held, and descriptors and memory of the process PID are what they were after a
first round. No dependencies.
"""

import argparse
import asyncio
import collections
import json
import os
import random
import re
import sys
import time
import urllib.parse

BASE = urllib.parse.urlparse(os.environ.get("BASE_URL", "http://127.0.0.1:8000"))
MODEL = os.environ.get("MODEL", "s-moe")
# Longer than any request here may take, however busy the machine: one that takes longer is stuck.
STUCK = 120


def request(body, path="/v1/chat/completions"):
    text = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nhost: {BASE.netloc}\r\ncontent-type: application/json\r\n"
    return head.encode() + f"content-length: {len(text)}\r\nconnection: close\r\n\r\n".encode() + text


def chat(number, stream, tokens=24, **more):
    messages = [{"role": "user", "content": f"Tell me about the number {number}."}]
    return request({"model": MODEL, "messages": messages, "max_tokens": tokens, "stream": stream, **more})


async def connect():
    return await asyncio.open_connection(BASE.hostname, BASE.port)


async def hang_up(writer):
    writer.close()
    try:
        await writer.wait_closed()
    except (ConnectionError, OSError):
        pass


async def exchange(data, half_close=False, slow=0.0):
    """Sends and reads to the end: status, headers, body."""
    reader, writer = await connect()
    try:
        writer.write(data)
        await writer.drain()
        if half_close and writer.can_write_eof():
            writer.write_eof()
        parts = []
        while part := await reader.read(256 if slow else 65536):
            parts.append(part)
            if slow:
                await asyncio.sleep(slow)
        head, _, body = b"".join(parts).partition(b"\r\n\r\n")
        lines = head.decode("latin-1").split("\r\n")
        status = int(lines[0].split()[1]) if lines and len(lines[0].split()) > 1 else 0
        headers = {k.lower(): v.strip() for k, _, v in (line.partition(":") for line in lines[1:])}
        return status, headers, body
    finally:
        await hang_up(writer)


def is_complete(headers, body):
    if headers.get("transfer-encoding") == "chunked":
        return body.endswith(b"\r\n0\r\n\r\n")
    return len(body) == int(headers.get("content-length", -1))


async def ask_and_leave(data, rng):
    reader, writer = await connect()
    try:
        writer.write(data[: rng.randrange(len(data))] if rng.random() < 0.3 else data)
        await writer.drain()
        if rng.random() < 0.7:
            try:
                await asyncio.wait_for(reader.read(rng.choice([1, 300, 3000])), rng.random() * 0.5)
            except asyncio.TimeoutError:
                pass
    finally:
        if rng.random() < 0.5:
            writer.transport.abort()
        else:
            await hang_up(writer)


async def client(i, deadline, counts):
    rng = random.Random(i)
    while time.monotonic() < deadline:
        kind = rng.choice(["whole", "stream", "leave", "leave", "half", "slow", "nothing"])
        stream = kind in ("stream", "slow") or rng.random() < 0.5
        data = chat(rng.randrange(1000), stream, rng.choice([1, 8, 24, 60]))
        try:
            if kind == "leave":
                await asyncio.wait_for(ask_and_leave(data, rng), STUCK)
            elif kind == "nothing":
                _, writer = await connect()
                await asyncio.sleep(rng.random() * 0.2)
                await hang_up(writer)
            else:
                slow = 0.01 if kind == "slow" else 0.0
                status, headers, body = await asyncio.wait_for(exchange(data, kind == "half", slow), STUCK)
                counts[status] += 1
                if status == 429:
                    assert int(headers["retry-after"]) >= 1, headers
                    await asyncio.sleep(rng.random())
                elif kind == "half" and not is_complete(headers, body):
                    counts["half, broken off"] += 1
                    assert status in (0, 200) and b"data: [DONE]" not in body, (status, body[-300:])
                elif status == 200 and stream:
                    assert is_complete(headers, body) and b"data: [DONE]" in body, (kind, body[-300:])
                    assert b'"error"' not in body, (kind, body[-300:])
                else:
                    assert status == 200 and is_complete(headers, body), (kind, status, body[:300])
        except asyncio.TimeoutError:
            raise AssertionError(f"client {i}: {kind} is stuck")
        except (ConnectionError, OSError) as error:
            counts[type(error).__name__] += 1
        counts[kind] += 1


def process(pid):
    status = open(f"/proc/{pid}/status").read()
    rss = int(re.search(r"VmRSS:\s+(\d+)", status)[1]) * 1024
    threads = int(re.search(r"Threads:\s+(\d+)", status)[1])
    return {"descriptors": len(os.listdir(f"/proc/{pid}/fd")), "threads": threads, "rss": rss}


async def idle(pid, before):
    """The process when its threads are those of before: of a pool of blocking work, they end some seconds after it."""
    end = time.monotonic() + 30
    while (after := process(pid))["threads"] > before["threads"] and time.monotonic() < end:
        await asyncio.sleep(0.5)
    return after


async def gauges():
    reader, writer = await connect()
    writer.write(f"GET /metrics HTTP/1.1\r\nhost: {BASE.netloc}\r\nconnection: close\r\n\r\n".encode())
    text = (await reader.read(-1)).decode()
    await hang_up(writer)
    found = {}
    for line in text.splitlines():
        if match := re.match(r"(smoe_\w+)(?:\{[^}]*\})? ([0-9.e+-]+)$", line):
            found[match[1]] = found.get(match[1], 0.0) + float(match[2])
    return found


async def quiet():
    """Waits until nothing runs or waits; what runs must end."""
    end = time.monotonic() + STUCK
    while time.monotonic() < end:
        now = await gauges()
        if now.get("smoe_jobs_running", 0) == now.get("smoe_jobs_queued", 0) == 0:
            return now
        await asyncio.sleep(0.2)
    raise AssertionError(f"jobs go on: {now}")


async def round_of(clients, seconds, counts):
    deadline = time.monotonic() + seconds
    await asyncio.gather(*(client(i, deadline, counts) for i in range(clients)))
    return await quiet()


async def same_as_alone():
    def data(i):
        return chat(i, False, 32, temperature=0.8, seed=i)

    def text(answer):
        status, _, body = answer
        assert status == 200, body
        return json.loads(body)["choices"][0]["message"]["content"]

    alone = [text(await exchange(data(i))) for i in range(8)]
    for _ in range(3):
        together = [text(answer) for answer in await asyncio.gather(*(exchange(data(i)) for i in range(8)))]
        assert together == alone, "eight at once get what each gets alone"


async def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("pid", type=int)
    parser.add_argument("--clients", type=int, default=200)
    parser.add_argument("--seconds", type=float, default=60)
    args = parser.parse_args()
    await same_as_alone()
    await round_of(args.clients, min(10, args.seconds / 3), collections.Counter())
    before = process(args.pid)
    counts = collections.Counter()
    left = await round_of(args.clients, args.seconds, counts)
    after = await idle(args.pid, before)
    print(f"{args.clients} clients, {args.seconds:g} s: {dict(counts)}")
    print(f"before {before}\nafter  {after}\nKV blocks held {left.get('smoe_kv_blocks_used')}")
    assert counts[200] > 0 and counts[429] > 0, "some were answered, and some told to come again"
    assert left.get("smoe_kv_blocks_used", 0) == 0, left
    assert after["descriptors"] <= before["descriptors"] + 4, "descriptors"
    assert after["threads"] <= before["threads"] + 2, "threads"
    assert after["rss"] <= before["rss"] * 1.05 + (8 << 20), "memory"
    await same_as_alone()
    print("nothing is left of them")


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
