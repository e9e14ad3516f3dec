#!/bin/sh
# An agent in shell: one question with curl. The prompt is the argument.
set -eu
curl --silent --fail-with-body --max-time 600 "$OPENAI_BASE_URL/chat/completions" \
  --header "Authorization: Bearer $OPENAI_API_KEY" --header "Content-Type: application/json" \
  --data "{\"model\": \"student\", \"messages\": [{\"role\": \"user\", \"content\": \"$1\"}]}"
