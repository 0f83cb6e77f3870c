/* A coordinator's metrics over HTTP: GET /metrics, in the text format of Prometheus. */
#pragma once

#include "control/coordinator.h"

struct event_base;
typedef struct dray__metrics dray__metrics;

/* Listens at "PORT" or "127.0.0.1:PORT" (port 0 means any), "HOST:PORT", "[V6]:PORT", on base's
 * loop. HTTP is neither encrypted nor authenticated. Beyond loopback, only readers on trusted
 * networks ($DRAY_TRUSTED_NETWORKS) are answered. When there are none, it does not listen there
 * (DRAY_EPERM). coordinator is borrowed. url is the address of the metrics. */
int dray__metrics_new(struct event_base *base, const dray__coordinator *coordinator,
                      const char *address, dray__metrics **out, const char **url,
                      dray_error *error);
/* Whether `address` is one. DRAY_EINVALID */
int dray__metrics_check(const char *address, dray_error *error);
void dray__metrics_free(dray__metrics *metrics); /* NULL is fine */
