/* Claims that a shell holds. A claim ends with the session that made it, but a command of a shell
 * ends at once. So `dray queue claim` starts a process that keeps the session and answers `read`,
 * `commit`, `fail` and `release` at a Unix socket. The socket's path is the name of the claim. It
 * ends with the claim, with its coordinator, or after the time for which rows may be held. */
#pragma once

#include "cmd/queue/queue_json.h"

#include <dray/queue.h>

typedef struct cmd_claim_request {
    const char *address, *queue;
    dray_claim_options claim; /* max_hold_ns is how long the holder runs */
} cmd_claim_request;

/* Starts the holder, and waits until it has rows. *out is a new object {"claim": PATH, "partition",
 * "rows": [{slot, generation, attempt, group, id, weight}], "micro_batches": [rows of each]}. */
int cmd_claim_start(const cmd_claim_request *request, json_t **out, dray_error *error);

/* Sends a request to a holder: {"do": "read", "columns": [...]}, {"do": "commit", "rows": [...],
 * "dtypes": {...}, "tags": {key: [...]}, "open": ...}, {"do": "fail", "reason": ...}, {"do":
 * "release"}. Takes `request`. *out is its answer, for `read` {"rows": [...]}. Returns 0, or
 * DRAY_EGONE when there is no such claim (any more). */
int cmd_claim_ask(const char *path, json_t *request, json_t **out, dray_error *error);
