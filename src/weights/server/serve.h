/* src/weights/server/: the answers of data servers (net/server.h) about weights. pull.c encodes and
 * checks requests for rectangles and their answers, exports.c lets readers read one-sidedly,
 * nccl_serve.c sends through NCCL, and arena.c has the bounded memory that leaves the process.
 * local.c lists the members of the process. */

/* A process's data server, which answers requests for the weights of its publishers and subscribers
 * (pull.h). It belongs to the context and ends with it. */
#pragma once

#include <stdbool.h>

#include <dray/dray.h>

/* Starts the context's data server, at the first call. It serves other hosts when the coordinator
 * was reached by TCP, the context was given a host's name, or $DRAY_DATA_ADDRESS has an address;
 * else, if it is needed, this host alone. *endpoint is the address for readers, borrowed until the
 * context is closed; NULL when no other host can reach it. */
int dray__serve_start(dray_context *context, bool needed, const char **endpoint, dray_error *error);
