#include "run/report/metrics.h"

#include "base/error.h"
#include "run/report/http.h"
#include "run/report/prometheus.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

struct dray__metrics {
    const dray__coordinator *coordinator;
    dray__http_options options;
    dray__http *http;
};

static char *print_status(const dray__coordinator *coordinator, size_t *size)
{
    char *text = NULL;
    json_t *status = dray__coordinator_status(coordinator);
    FILE *out = status ? open_memstream(&text, size) : NULL;
    if (out)
        dray__prometheus(status, out);
    json_decref(status);
    if (out && fclose(out) == 0)
        return text;
    free(text);
    return NULL;
}

static void answer(void *user, const char *path, dray__http_answer *out)
{
    const dray__metrics *m = user;
    if (strcmp(path, m->options.path) != 0)
        return;
    out->type = "text/plain; version=0.0.4; charset=utf-8";
    out->body = print_status(m->coordinator, &out->size);
    out->status = out->body ? "200 OK" : "500 Internal Server Error";
}

int dray__metrics_new(struct event_base *base, const dray__coordinator *coordinator,
                      const char *address, dray__metrics **out, const char **url, dray_error *error)
{
    dray__metrics *m = calloc(1, sizeof *m);
    if (!m)
        return dray__nomem(error);
    m->coordinator = coordinator;
    m->options = (dray__http_options){.path = "/metrics", .answer = answer, .user = m};
    int rc = dray__http_new(base, address, &m->options, &m->http, url, error);
    if (rc)
        free(m);
    else
        *out = m;
    return rc;
}

int dray__metrics_check(const char *address, dray_error *error)
{
    return dray__http_check(address, error);
}

void dray__metrics_free(dray__metrics *m)
{
    if (m)
        dray__http_free(m->http);
    free(m);
}
