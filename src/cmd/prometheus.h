/* A coordinator's status in the text format of Prometheus. */
#ifndef DRAY_CMD_PROMETHEUS_H
#define DRAY_CMD_PROMETHEUS_H

#include <jansson.h>
#include <stdio.h>

/* status: what dray_context_status answers. */
void cmd_prometheus(json_t *status, FILE *out);

#endif
