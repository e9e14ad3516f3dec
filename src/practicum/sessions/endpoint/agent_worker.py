"""Run a function for tasks that come as lines of JSON: `python agent_worker.py [folder/]module:function`.

Runs in any Python environment, with the standard library alone. Its input has tasks and cancellations, its
output what the function returned or why it failed. An async function runs on one event loop, a sync one in
a thread for each task.
"""

import asyncio
import importlib
import inspect
import json
import os
import sys
import threading
from types import SimpleNamespace


def load(name):
    """Return the function. Modules of its folder, or of the working directory, are found first."""
    place, _, function = name.rpartition(":")
    folder, _, module = place.rpartition("/")
    sys.path.insert(0, os.path.abspath(folder or "."))
    function = getattr(importlib.import_module(module.removesuffix(".py")), function)
    inspect.signature(function).bind(None)
    return function


async def serve(function, replies):
    """Run tasks until the input ends."""
    loop, running = asyncio.get_running_loop(), {}

    def reply(message):
        replies.write(json.dumps(message) + "\n")
        replies.flush()

    async def run(number, fields):
        try:
            task = SimpleNamespace(**fields)
            if inspect.iscoroutinefunction(function):
                value = await function(task)
            else:
                value = await in_thread(lambda: function(task))
            json.dumps(value)
            reply({"id": number, "value": value})
        except asyncio.CancelledError:
            pass
        except BaseException as error:
            import traceback

            traceback.print_exc()
            reply({"id": number, "failure": f"raised {type(error).__name__}: {error}"})
        finally:
            running.pop(number, None)

    async def in_thread(call):
        arrival = loop.create_future()

        def work():
            try:
                outcome = call(), None
            except BaseException as error:
                outcome = None, error
            loop.call_soon_threadsafe(lambda: arrival.done() or arrival.set_result(outcome))

        threading.Thread(target=work, daemon=True).start()
        value, error = await arrival
        if error is not None:
            raise error
        return value

    def handle(message):
        if "cancel" in message:
            if (task := running.get(message["cancel"])) is not None:
                task.cancel()
        else:
            running[message["id"]] = asyncio.create_task(run(message["id"], message["task"]))

    def read():
        for line in sys.stdin:
            loop.call_soon_threadsafe(handle, json.loads(line))
        os._exit(0)

    threading.Thread(target=read, daemon=True).start()
    await loop.create_future()


def main():
    # What the function prints must not come between the replies.
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    function = load(sys.argv[1])
    if "--check" not in sys.argv:
        asyncio.run(serve(function, replies))


if __name__ == "__main__":
    main()
