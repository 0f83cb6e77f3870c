/* A coordinator's metrics over HTTP: GET /metrics, in the text format of Prometheus. */
#pragma once

#include "control/coordinator.h"

struct event_base;
typedef struct dray__metrics dray__metrics;

/* Listens at "PORT" or "127.0.0.1:PORT" (port 0 means any), "HOST:PORT", "[V6]:PORT", on base's
 * loop. HTTP is neither encrypted nor authenticated. On addresses other than loopback, only readers
 * on trusted networks ($DRAY_TRUSTED_NETWORKS) are answered. Returns DRAY_EPERM for such an address
 * when no network is trusted. coordinator is borrowed. url is the address of the metrics. */
int dray__metrics_new(struct event_base *base, const dray__coordinator *coordinator,
                      const char *address, dray__metrics **out, const char **url,
                      dray_error *error);
/* Returns 0, or DRAY_EINVALID when `address` is not an address. */
int dray__metrics_check(const char *address, dray_error *error);
void dray__metrics_free(dray__metrics *metrics); /* NULL is fine */
