/* A whole coordinator: the event loop with every service, listening, until it is stopped. What
 * `dray serve` is, and the process that `dray run` starts. */
#pragma once

#include <dray/dray.h>
#include <stdbool.h>

typedef struct dray__serve_options {
    const char *unix_path;     /* socket to listen at; NULL: none */
    const char *tcp_address;   /* "127.0.0.1:0"; NULL: none */
    const char *token_path;    /* the master token's file, made when it is not there; NULL: one for
                                * this time only, where clients of this host look for it */
    const char *keeper_path;   /* the queue's keeper, told to clients; NULL: there is none */
    const char *journal;       /* folder of durable queues, made when it is not there; NULL: none */
    const char *const *stores; /* of queues' bytes (queue/server/controller.h); NULL: none */
    const char *limits;        /* control/limits.h; NULL: $DRAY_LIMITS, or the defaults */
    const char *metrics; /* where to answer GET /metrics (run/report/metrics.h); NULL: nowhere */
    bool hosts;          /* others may join the run (control/relay.h) */
    bool sandbox;        /* write nowhere but in its own folders (run/supervisor/sandbox.h) */
    bool start_keeper;   /* run it here, in a thread; else another process runs it */
    /* Called once when everything listens. An address is NULL where there is none. */
    void (*ready)(void *user, const char *unix_address, const char *tcp_address,
                  const char *metrics_url);
    void *user;
} dray__serve_options;

/* Runs until SIGINT or SIGTERM; returns DRAY_OK then. Takes those two
 * signals over while it runs. */
int dray__serve(const dray__serve_options *options, dray_error *error);

typedef struct dray__keep_options {
    const char *path;   /* of its socket, absolute */
    const char *listen; /* of its data server; NULL: $DRAY_DATA_ADDRESS, or where it reaches the
                           coordinator from */
    uint64_t max_bytes; /* 0: no limit but memory */
    bool sandbox;       /* write nowhere but in its socket's folder (run/supervisor/sandbox.h) */
    void (*ready)(void *user, const char *endpoint);
    void *user;
} dray__keep_options;

/* Keeps samples of this host for the coordinator at $DRAY_ADDRESS, until SIGINT or SIGTERM. */
int dray__keep(const dray__keep_options *options, dray_error *error);

/* The token of a role, made from the master token at `master` (NULL: $DRAY_TOKEN_FILE), which role
 * "master" draws anew instead. Written to `path` (mode 0600; it must not exist), or as text, to be
 * freed. DRAY_ENOENT: no master; DRAY_EINVALID: not a role, or the file is no master's; what
 * reading and writing files returns. */
int dray__make_token(const char *master, const char *role, const char *path, char **text,
                     dray_error *error);

/* Nobody but this machine reaches it. */
bool dray__is_local_address(const char *text);

/* Path of the socket that `dray serve` listens at, and `dray status` asks, when no option says
 * another: $XDG_RUNTIME_DIR/dray.socket, or /tmp/dray-<uid>.socket. Returns out. */
char *dray__default_socket(char *out, size_t capacity);
