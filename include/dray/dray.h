/* dray.h - errors, log, fences and the context: what every other part of the library needs.
 *
 * Conventions of the whole API:
 *  - Functions that can fail return DRAY_OK (0) or a negative DRAY_E... code. Outputs come last but
 *    for the error and are set only on success.
 *  - dray_error is the caller's; NULL is fine. The function that detects an error fills it once:
 * what was expected, what was found, and where.
 *  - Options structs start with their size (the _INIT macros set it); zero means "default". They
 *    only grow, at the end: a size smaller than the first version's is DRAY_EINVALID, and
 *    DRAY_EVERSION says that something is set which this library is too old to know.
 *  - Arguments are borrowed for the call unless the function says otherwise.
 *  - Different objects may be used from any threads; one object from one thread at a time, unless
 *    the function says otherwise. An object is closed when no thread is in one of its calls: this
 *    library does not check it. The Python package does, and refuses with DRAY_EBUSY.
 *  - Times are nanoseconds (int64_t). A timeout of 0 means "do not wait"; DRAY_WAIT_DEFAULT means
 *    the context's default; there is no "forever".
 */
#ifndef DRAY_DRAY_H
#define DRAY_DRAY_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define DRAY_VERSION_MAJOR 0
#define DRAY_VERSION_MINOR 1
#define DRAY_VERSION_PATCH 0

/* The one table of errors: it makes the enum, the names, the texts (and, in Python, exceptions).
 * XX(name, value, text) */
#define DRAY_ERROR_MAP(XX)                                                                         \
    XX(INVALID, -1, "invalid argument")                                                            \
    XX(NOMEM, -2, "out of memory")                                                                 \
    XX(NOENT, -3, "not found")                                                                     \
    XX(EXIST, -4, "exists already")                                                                \
    XX(SYS, -5, "system call failed")                                                              \
    XX(FORMAT, -6, "malformed data")                                                               \
    XX(VERSION, -7, "unsupported version")                                                         \
    XX(CHECKSUM, -8, "checksum differs")                                                           \
    XX(DTYPE, -9, "dtype cannot be converted")                                                     \
    XX(SHAPE, -10, "shape differs")                                                                \
    XX(HOLE, -11, "elements that no source holds")                                                 \
    XX(OVERLAP, -12, "elements filled twice")                                                      \
    XX(TIMEDOUT, -13, "deadline passed")                                                           \
    XX(AGAIN, -14, "not ready yet")                                                                \
    XX(CLOSED, -15, "connection closed")                                                           \
    XX(DEAD, -16, "member is dead")                                                                \
    XX(STALE, -17, "superseded")                                                                   \
    XX(GONE, -18, "no longer available")                                                           \
    XX(END, -19, "nothing more will come")                                                         \
    XX(FULL, -20, "capacity reached")                                                              \
    XX(TORN, -21, "group is torn")                                                                 \
    XX(PERM, -22, "not permitted")                                                                 \
    XX(BUSY, -23, "in use")                                                                        \
    XX(PROTO, -24, "protocol violation")                                                           \
    XX(CANCELED, -25, "canceled")                                                                  \
    XX(UNSUPPORTED, -26, "not supported")                                                          \
    XX(INTERNAL, -27, "internal error")

typedef enum dray_status {
    DRAY_OK = 0,
#define XX(name, value, text) DRAY_E##name = value,
    DRAY_ERROR_MAP(XX)
#undef XX
} dray_status;

/* The library or system that reported an error; it decides the meaning of dray_error.raw. */
typedef enum dray_origin {
    DRAY_ORIGIN_DRAY = 0, /* raw = 0 */
    DRAY_ORIGIN_ERRNO,    /* raw = errno */
    DRAY_ORIGIN_CUDA,     /* raw = CUresult */
    DRAY_ORIGIN_NCCL,     /* raw = ncclResult_t */
    DRAY_ORIGIN_UCX,      /* raw = ucs_status_t */
    DRAY_ORIGIN_WAIT      /* raw = dray_wait_cause (trace.h): the cause of a wait that timed out */
} dray_origin;

#define DRAY_ERROR_MESSAGE_MAX 496

typedef struct dray_error {
    int32_t code; /* DRAY_E... */
    int32_t origin;
    int64_t raw;
    char message[DRAY_ERROR_MESSAGE_MAX]; /* UTF-8, terminated, no newline */
} dray_error;

/* "EHOLE" for DRAY_EHOLE; "OK" for 0; "E?" for an unknown code. Static storage. */
const char *dray_error_name(int code);
/* The table's text for a code. Static storage. */
const char *dray_strerror(int code);
/* "0.1.0". Static storage. */
const char *dray_version(void);

typedef enum dray_log_level {
    DRAY_LOG_ERROR = 0,
    DRAY_LOG_WARN,
    DRAY_LOG_INFO,
    DRAY_LOG_DEBUG
} dray_log_level;

typedef void (*dray_log_fn)(void *user, dray_log_level level, const char *line);

/* Sends the library's log lines of `level` and above (more severe) to fn, from any thread. NULL
 * turns logging off, which is the default: the library never prints. fn is called under a lock: it
 * must not call this library. Process-wide. */
void dray_set_log(dray_log_fn fn, void *user, dray_log_level level);

#define DRAY_WAIT_DEFAULT ((int64_t)-1)

/* A fence says when memory is written. Kind NONE means that it was written before the call, which
 * is enough for host memory. */
typedef enum dray_fence_kind {
    DRAY_FENCE_NONE = 0,
    DRAY_FENCE_CUDA_EVENT,
    DRAY_FENCE_CUDA_STREAM /* the call records an event on the stream */
} dray_fence_kind;

typedef struct dray_fence {
    size_t size;
    int32_t kind; /* dray_fence_kind */
    /* CUDA_EVENT: a CUevent that was recorded after the last write. CUDA_STREAM: the CUstream of
     * the last write, on the GPU that has the memory; NULL: the default stream. */
    void *event;
} dray_fence;

#define DRAY_FENCE_INIT                                                                            \
    {                                                                                              \
        sizeof(dray_fence), DRAY_FENCE_NONE, NULL                                                  \
    }

typedef struct dray_context dray_context;

typedef struct dray_options {
    size_t size;
    const char *address; /* "unix:/path", "tcp:host:port", "tcp:[v6]:port"; NULL means
                          * $DRAY_ADDRESS */
    const char *name;    /* shown in messages and in `dray status`; NULL means the program's name */
    const char *role;    /* "trainer", "engine", "task", "tool"; NULL means the token's, or
                          * "task" */
    const char *host;    /* NULL means $DRAY_HOST, or the machine's boot id + hostname */
    uint32_t rank;       /* rank within the role's group */
    int64_t timeout_ns;  /* default deadline of every wait; 0 means 60 s */
    /* Networks in which weights may be sent unencrypted, such as "10.1.0.0/16, fd00::/8"; NULL:
     * $DRAY_TRUSTED_NETWORKS; "": none. */
    const char *trusted_networks;
    /* The transport of weights between hosts of trusted networks: "stream", which is TCP; "ucx",
     * which is UCX over TCP or RDMA; or "auto", which is UCX where this host has RDMA devices and
     * the other host agrees, else TCP. NULL: $DRAY_TRANSPORT, or "auto". "ucx" is an error where
     * UCX is missing or the network is not trusted. */
    const char *transport;
} dray_options;

#define DRAY_OPTIONS_INIT                                                                          \
    {                                                                                              \
        sizeof(dray_options), NULL, NULL, NULL, NULL, 0, 0, NULL, NULL                             \
    }

/* Checks that a transport ("auto", "stream" or "ucx") can be used on this machine. detail gets a
 * text of at most `size` bytes that describes it, such as "1.13.1, transports tcp,self".
 * DRAY_EUNSUPPORTED: it cannot; the message says what to do. DRAY_EINVALID: the name is another
 * one. Threads: any. Does not block. */
int dray_transport_find(const char *transport, char *detail, size_t size, dray_error *error);

/* Opens a session with the coordinator. One session for each process is enough. When the session
 * ends, by dray_close or because the process dies, everything that was opened through it ends as
 * well. options: NULL for all defaults. *out is the caller's, to be ended with dray_close.
 *
 * The call waits up to the timeout for a coordinator that does not listen yet, so that processes
 * may start in any order. When the coordinator is started again later, calls wait for it until
 * their deadlines and go on with the same member id; DRAY_EPERM: the new coordinator does not know
 * this member. A TCP connection on which nothing passes for 10 s is taken for broken, and the
 * session ends.
 *
 * Over TCP, which is TLS 1.3, both sides prove that they know a token: $DRAY_TOKEN, else the file
 * $DRAY_TOKEN_FILE, which only its user may read, else the file in which a coordinator of this host
 * puts it. A token belongs to a role (`dray token`) and allows what the role needs. Over the Unix
 * socket its user may do everything.
 *
 * DRAY_EINVALID: the address or trusted_networks are malformed, or there is no address.
 * DRAY_ENOENT: there is no token, or no such host. DRAY_EPERM: the token is wrong or of another
 * role, other users can read its file, or another user listens at the Unix socket. DRAY_ECLOSED: no
 * coordinator listens there. DRAY_EVERSION: there is no common version of the protocol.
 * DRAY_EPROTO: the other side does not speak TLS. DRAY_ETIMEDOUT, DRAY_ENOMEM, DRAY_ESYS. Threads:
 * all threads may use the context at the same time. Blocks. After fork() the child gets
 * DRAY_ECLOSED from all calls that use the parent's context; the session stays the parent's. */
int dray_open(const dray_options *options, dray_context **out, dray_error *error);

/* Ends the session. NULL is fine. Objects opened through it must be closed first, and no other
 * thread may be using it. In a forked child it frees the child's copy only. Does not block. */
void dray_close(dray_context *context);

/* Returns the member id, which the coordinator chooses: 1 or more, and never used twice. Threads:
 * any. Does not block. */
uint64_t dray_context_member(const dray_context *context);
/* Returns the epoch: 1 for the first session of this role, name and rank, and one more for each
 * later one, so that a process that was started again has a higher epoch. Threads: any. Does not
 * block. */
uint64_t dray_context_epoch(const dray_context *context);

/* Waits until `count` sessions have entered the barrier of this name. All give the same count.
 * name: 1 to 256 bytes of UTF-8 without control characters. count: at least 1. timeout_ns 0: the
 * session leaves at once unless it is the last to enter. A barrier can be used again as soon as it
 * has opened. DRAY_ETIMEDOUT: this session has left; the others still wait. DRAY_EDEAD: a session
 * that had entered died, which the message names, and all have left. DRAY_EBUSY: this session waits
 * at the barrier already. DRAY_EINVALID: the counts differ, or the name is empty. DRAY_ECLOSED.
 * Threads: any. Blocks up to the timeout. */
int dray_barrier(dray_context *context, const char *name, uint32_t count, int64_t timeout_ns,
                 dray_error *error);

/* Posts one JSON object to all programs that watch reports of `kind`, such as "step", "update" or
 * "eval" (1 to 64 bytes). json: text of at most 64 KiB. The coordinator adds "kind", "member",
 * "name" and "time_ns" (since 1970), and keeps the last 8 MiB of reports. DRAY_EFORMAT: the text is
 * not a JSON object. DRAY_EINVALID: the kind or the size. DRAY_ECLOSED. DRAY_ETIMEDOUT: the
 * coordinator does not answer. Threads: any. Does not wait for the watchers. */
int dray_report_post(dray_context *context, const char *kind, const char *json, dray_error *error);

/* Gets the coordinator's state as one JSON object: "version", "pid", "listening", "sessions"
 * (oldest first: member, epoch, name, role, rank, pid, local: whether that process is seen on the
 * coordinator's host, age_seconds, connections), "barriers", "reports", and a part of each service.
 * *json is terminated UTF-8, freed with dray_free. DRAY_ECLOSED, DRAY_ETIMEDOUT, DRAY_ENOMEM.
 * Threads: any. Blocks up to the context's timeout. */
int dray_context_status(dray_context *context, char **json, dray_error *error);

/* Sets a function that can interrupt waiting calls, for languages whose runtime handles signals
 * between calls. While a call of the thread that has set it waits, `ask` is called after each
 * signal and every 0.2 s. When it returns another number than 0, the call ends as if its deadline
 * had passed, and so do later calls until it returns 0. `ask` may call the library, but not with an
 * object of the waiting call. NULL removes the function. There is one for the process. Threads:
 * any. Does not block. */
typedef int (*dray_interrupt_fn)(void);
void dray_set_interrupt(dray_interrupt_fn ask);

/* Frees memory of functions whose comment says so. NULL is fine. */
void dray_free(void *memory);

#ifdef __cplusplus
}
#endif
#endif
