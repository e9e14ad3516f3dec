"""An agent as a function: it asks, and asks once more if the answer is wrong. It returns the reward."""

import httpx2

from practicum.sessions.endpoint.programs import AgentTask


def solve(task: AgentTask) -> float:
    headers = {"authorization": f"Bearer {task.api_key}"}
    messages = list(task.messages)
    with httpx2.Client(base_url=task.base_url, headers=headers, timeout=600) as client:
        for attempt in range(2):
            body = {"model": task.model, "messages": messages}
            response = client.post("/chat/completions", json=body).raise_for_status()
            said = response.json()["choices"][0]["message"]
            if said["content"] == task.answer:
                return 1.0 - attempt / 2
            messages += [said, {"role": "user", "content": "no"}]
    return 0.0
