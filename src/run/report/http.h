/* A small server of HTTP/1.1: only GET, with a request and its answer, or a stream of events to a
 * reader that stays. */
#pragma once

#include <dray/dray.h>
#include <stdbool.h>
#include <stddef.h>

struct event_base;
typedef struct dray__http dray__http;

/* The answer to a path. With nothing set it is "404 Not Found". body is malloc'ed, or NULL. stream:
 * dray__http_push sends more. */
typedef struct dray__http_answer {
    const char *status, *type;
    char *body;
    size_t size;
    bool stream;
} dray__http_answer;

typedef struct dray__http_options {
    const char *path; /* of the printed address: "/metrics" */
    void (*answer)(void *user, const char *path, dray__http_answer *out);
    void *user;
    bool check_host; /* answer only requests whose Host is the address or localhost */
} dray__http_options;

/* Listens at "PORT" or "127.0.0.1:PORT" (port 0 means any), "HOST:PORT", "[V6]:PORT", on base's
 * loop. HTTP is neither encrypted nor authenticated. On addresses other than loopback, only readers
 * on trusted networks ($DRAY_TRUSTED_NETWORKS) are answered. Returns DRAY_EPERM for such an address
 * when no network is trusted. options is borrowed. url is the address at which it listens. */
int dray__http_new(struct event_base *base, const char *address, const dray__http_options *options,
                   dray__http **out, const char **url, dray_error *error);
/* Sends data to all readers of a stream. Called on the loop's thread. */
void dray__http_push(dray__http *http, const char *data, size_t size);
/* Returns 0, or DRAY_EINVALID when `address` is not an address. */
int dray__http_check(const char *address, dray_error *error);
void dray__http_free(dray__http *http); /* NULL is fine */
