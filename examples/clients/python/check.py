"""Checks a key over REST and over the Redis protocol (redis-py).

Start the service, then run this program:

    tollgate --resp
    pip install redis
    python check.py

TOLLGATE_URL and TOLLGATE_REDIS_URL name other addresses. A token (api.token_file) goes into TOLLGATE_TOKEN.
"""

import json
import os
import urllib.error
import urllib.parse
import urllib.request

import redis

URL = os.environ.get("TOLLGATE_URL", "http://127.0.0.1:8080")
REDIS_URL = os.environ.get("TOLLGATE_REDIS_URL", "redis://127.0.0.1:6380")
TOKEN = os.environ.get("TOLLGATE_TOKEN")


def check_rest(key: str, permits: int = 1) -> dict:
    """Takes permits of a key. A denial is an answer too: HTTP status 429."""
    query = urllib.parse.urlencode({"key": key, "permits": permits})
    request = urllib.request.Request(f"{URL}/api/v1/rate-limit/check?{query}")
    if TOKEN:
        request.add_header("Authorization", f"Bearer {TOKEN}")
    try:
        with urllib.request.urlopen(request, timeout=1) as response:
            return json.load(response)
    except urllib.error.HTTPError as denied:
        if denied.code != 429:
            raise
        return json.load(denied)


def main() -> None:
    answer = check_rest("python:rest")
    print(f"REST: allowed={answer['allowed']} remaining={answer['remaining']}")

    # With protocol 3, TG.CHECK answers with a dictionary.
    client = redis.Redis.from_url(REDIS_URL, password=TOKEN, protocol=3, decode_responses=True)
    limited, limit, remaining, retry_after, reset_after = client.execute_command(
        "CL.THROTTLE", "python:cell", 15, 30, 60
    )
    print(f"CL.THROTTLE: limited={limited} limit={limit} remaining={remaining} "
          f"retry_after={retry_after} reset_after={reset_after}")

    answer = client.execute_command("TG.CHECK", "KEY", "python:key")
    print(f"TG.CHECK KEY: allowed={answer['allowed']} remaining={answer['remaining']}")
    answer = client.execute_command("TG.CHECK", "user", "alice", "path", "/api/items")
    print(f"TG.CHECK: allowed={answer['allowed']} rule={answer['rule']}")

    # Sixteen checks in one pipeline: one round trip.
    with client.pipeline(transaction=False) as pipeline:
        for number in range(16):
            pipeline.execute_command("CL.THROTTLE", f"python:{number}", 15, 30, 60)
        print(f"pipeline: {sum(reply[0] == 0 for reply in pipeline.execute())} of 16 allowed")


if __name__ == "__main__":
    main()
