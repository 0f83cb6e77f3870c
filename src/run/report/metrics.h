/* A coordinator's metrics over HTTP: GET /metrics, in the text format of Prometheus. */
#pragma once

#include "control/coordinator.h"

struct event_base;
typedef struct dray__metrics dray__metrics;

/* Listens at "PORT" or "127.0.0.1:PORT" (port 0: any), "HOST:PORT", "[V6]:PORT", on base's loop.
 * HTTP is neither encrypted nor proven: beyond loopback only those on networks that are named as
 * trusted ($DRAY_TRUSTED_NETWORKS) are answered, and without any it does not listen there
 * (DRAY_EPERM). coordinator: borrowed. url: where it listens, the metrics'. */
int dray__metrics_new(struct event_base *base, const dray__coordinator *coordinator,
                      const char *address, dray__metrics **out, const char **url,
                      dray_error *error);
/* Whether `address` is one. DRAY_EINVALID */
int dray__metrics_check(const char *address, dray_error *error);
void dray__metrics_free(dray__metrics *metrics); /* NULL is fine */
