/* A process's data server: one thread that answers requests for what its publishers and subscribers
 * hold (pull.h), from readers on other hosts. It belongs to the context and ends with it. */
#ifndef DRAY_WEIGHTS_SERVE_H
#define DRAY_WEIGHTS_SERVE_H

#include <stdbool.h>

#include <dray/dray.h>

/* The context's data server, started when it is first asked for. Started where other hosts may be:
 * when the coordinator was reached by TCP, the context was given a host's name, or
 * $DRAY_DATA_ADDRESS says where to listen; else, if it is needed, on this host alone. endpoint:
 * where readers find it; NULL: nobody outside this host can. Borrowed until the context is closed.
 */
int dray__serve_start(dray_context *context, bool needed, const char **endpoint, dray_error *error);

#endif
