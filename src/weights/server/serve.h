/* src/weights/server/: what data servers (net/server.h) answer of weights. pull.c encodes and
 * checks requests for rectangles and their answers, exports.c lets readers read one-sidedly,
 * nccl_serve.c sends through NCCL, and arena.c has the bounded memory that leaves the process.
 * local.c lists what the process holds. */

/* A process's data server, which answers requests for what its publishers and subscribers hold
 * (pull.h). It belongs to the context and ends with it. */
#pragma once

#include <stdbool.h>

#include <dray/dray.h>

/* The context's data server, started when it is first asked for. Started where other hosts may be:
 * when the coordinator was reached by TCP, the context was given a host's name, or
 * $DRAY_DATA_ADDRESS says where to listen; else, if it is needed, on this host alone. endpoint:
 * where readers find it; NULL: nobody outside this host can. Borrowed until the context is closed.
 */
int dray__serve_start(dray_context *context, bool needed, const char **endpoint, dray_error *error);
