/* A whole coordinator: an event loop with every service, which listens until it is stopped. `dray
 * serve` is one, and `dray run` starts one as a process. */
#pragma once

#include <dray/dray.h>
#include <stdbool.h>

typedef struct dray__serve_options {
    const char *unix_path;   /* socket to listen at; NULL when there is none */
    const char *tcp_address; /* "127.0.0.1:0"; NULL when there is none */
    const char *token_path;  /* the master token's file, made when it does not exist; NULL for a
                                temporary token at the path where clients of this host look for it */
    const char *keeper_path; /* the socket of the queue's keeper, sent to clients; NULL when there
                                is none */
    const char *journal; /* folder of durable queues, made when it does not exist; NULL when there
                            is none */
    /* Stores of queues' bytes (queue/server/controller.h); NULL when there are none. */
    const char *const *stores;
    const char *limits;  /* control/limits.h; NULL for $DRAY_LIMITS, or the defaults */
    const char *metrics; /* where to answer GET /metrics (run/report/metrics.h); NULL for nowhere */
    bool hosts;          /* other hosts may join the run (control/relay.h) */
    bool sandbox;        /* write nowhere but in its own folders (run/supervisor/sandbox.h) */
    bool start_keeper;   /* run the keeper here, in a thread; otherwise another process runs it */
    /* Called once when everything listens. An address is NULL when there is none. */
    void (*ready)(void *user, const char *unix_address, const char *tcp_address,
                  const char *metrics_url);
    void *user;
} dray__serve_options;

/* Runs until SIGINT, SIGTERM, or SIGHUP where it is not ignored, and then returns DRAY_OK. Handles
 * these signals while it runs. */
int dray__serve(const dray__serve_options *options, dray_error *error);

typedef struct dray__keep_options {
    const char *path;   /* of its socket, absolute */
    const char *listen; /* of its data server; NULL for $DRAY_DATA_ADDRESS, or the address from
                         * which it reaches the coordinator */
    uint64_t max_bytes; /* 0 when only memory limits it */
    bool sandbox;       /* write nowhere but in its socket's folder (run/supervisor/sandbox.h) */
    void (*ready)(void *user, const char *endpoint);
    void *user;
} dray__keep_options;

/* Keeps samples of this host for the coordinator at $DRAY_ADDRESS, until a signal that ends
 * dray__serve. */
int dray__keep(const dray__keep_options *options, dray_error *error);

/* Makes the token of a role from the master token at `master` (NULL for $DRAY_TOKEN_FILE), or draws
 * a new master token for role "master". Writes it to `path` (mode 0600; it must not exist), or
 * returns it as text, to be freed. Returns 0; DRAY_ENOENT without a master token; DRAY_EINVALID
 * when `role` is not a role or the file has no master token; or the errors of reading and writing
 * files. */
int dray__make_token(const char *master, const char *role, const char *path, char **text,
                     dray_error *error);

/* Returns whether only this machine can reach the address. */
bool dray__is_local_address(const char *text);

/* The default path of the socket at which `dray serve` listens, and which `dray status` asks:
 * $XDG_RUNTIME_DIR/dray.socket, or /tmp/dray-<uid>.socket. Returns out. */
char *dray__default_socket(char *out, size_t capacity);
