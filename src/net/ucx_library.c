/* Opens UCX, and makes its contexts (ucx.h). */
#ifdef DRAY_HAVE_UCX
#include "net/ucx.h"

#include "base/error.h"
#include "base/library.h"

#include <dirent.h>
#include <dlfcn.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static dray__ucx_library library;
static dray__ucx_version version, pretended;
static bool opened, pretends;
static char trouble[256];
static pthread_once_t once = PTHREAD_ONCE_INIT;

/* ---- the library ----------------------------------------------------------------------------- */

/* Turns off UCX's signal handlers, because signals belong to the program, and its messages on
 * stdout, because this library reports errors itself. */
static void quieten(void *ucs)
{
    static const int signals[] = {SIGILL, SIGSEGV, SIGBUS, SIGFPE};
    ucs_status_t (*set)(const char *, const char *);
    void (*disable)(int);
    *(void **)&set = dlsym(ucs, "ucs_global_opts_set_value");
    *(void **)&disable = dlsym(ucs, "ucs_debug_disable_signal");
    if (set)
        set("LOG_LEVEL", "fatal");
    for (size_t i = 0; i < sizeof signals / sizeof *signals && disable; i++)
        disable(signals[i]);
}

static const dray__symbol functions[] = {
#define XX(name) {#name, offsetof(dray__ucx_library, name), false},
    DRAY__UCX_FUNCTIONS(XX)
#undef XX
};
static const dray__symbol text = {"ucs_status_string", offsetof(dray__ucx_library, status_string),
                                  false};

static void open_library(void)
{
    void *ucs = dlopen("libucs.so.0", RTLD_NOW | RTLD_LOCAL);
    void *ucp = ucs ? dlopen("libucp.so.0", RTLD_NOW | RTLD_LOCAL) : NULL;
    if (!ucp) {
        snprintf(trouble, sizeof trouble, "install it (Debian: apt install libucx0): %s",
                 dlerror());
        return;
    }
    const char *missing =
        dray__symbols_load(ucp, functions, sizeof functions / sizeof *functions, &library);
    if (!missing)
        missing = dray__symbols_load(ucs, &text, 1, &library);
    if (missing) {
        snprintf(trouble, sizeof trouble,
                 "libucp: 1.13 or newer expected, found a library without %s", missing);
        return;
    }
    quieten(ucs);
    library.ucp_get_version(&version.major, &version.minor, &version.release);
    opened = version.major == 1 && version.minor >= 13;
    if (!opened)
        snprintf(trouble, sizeof trouble, "libucp: 1.13 or a later 1.x expected, found %u.%u.%u",
                 version.major, version.minor, version.release);
}

const dray__ucx_library *dray__ucx_library_get(void)
{
    pthread_once(&once, open_library);
    return opened ? &library : NULL;
}

int dray__ucx_find(dray__ucx_version *out, dray_error *error)
{
    if (!dray__ucx_library_get())
        return dray__fail(error, DRAY_EUNSUPPORTED, "UCX is not usable here; %s", trouble);
    *out = pretends ? pretended : version;
    return DRAY_OK;
}

void dray__ucx_pretend(const dray__ucx_version *other)
{
    pretends = other != NULL;
    if (other)
        pretended = *other;
}

int dray__ucx_fail(dray_error *error, ucs_status_t status, const char *what)
{
    /* UCX does not see a device that is down, so such an error may be temporary. */
    return dray__fail_library(error, status == UCS_ERR_NO_MEMORY ? DRAY_ENOMEM : DRAY_ESYS,
                              DRAY_ORIGIN_UCX, status, "UCX: %s: %s", what,
                              library.status_string(status));
}

bool dray__ucx_has_rdma(void)
{
    DIR *dir = opendir("/sys/class/infiniband");
    const struct dirent *entry = NULL;
    while (dir && (entry = readdir(dir)) && entry->d_name[0] == '.')
        ;
    if (dir)
        closedir(dir);
    return entry != NULL;
}

const char *dray__ucx_transports(void)
{
    return dray__ucx_has_rdma() ? "tcp,self,rc,ud,dc" : "tcp,self";
}

/* ---- contexts -------------------------------------------------------------------------------- */

struct shared {
    struct shared *next;
    char *devices;
    bool reads;
    ucp_context_h context;
    uint32_t users;
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct shared *all;
static atomic_int owner; /* the process that owns the workers; 0 when there are none. A forked child
                          * lacks UCX's thread */

static ucs_status_t make(const char *devices, bool reads, ucp_context_h *out)
{
    /* One-sided reads are used only if the network card does them, because UCX's emulation reads
     * any address that the other side gives. TCP is used without zero-copy, because UCX 1.13 aborts
     * the process when a connection breaks in the middle of such a send. With UCX's default
     * segments of 8 KiB, TCP reaches a third of the rate. */
    const char *const settings[][2] = {
        {"TLS", reads && dray__ucx_has_rdma() ? "self,rc,ud,dc" : dray__ucx_transports()},
        {"NET_DEVICES", devices},
        {"ZCOPY_THRESH", dray__ucx_has_rdma() ? "auto" : "inf"},
        {"TCP_TX_SEG_SIZE", "256k"},
        {"TCP_RX_SEG_SIZE", "256k"}};
    ucp_config_t *config;
    ucs_status_t status = library.ucp_config_read(NULL, NULL, &config);
    if (status != UCS_OK)
        return status;
    for (size_t i = 0; i < sizeof settings / sizeof *settings && status == UCS_OK; i++)
        status = library.ucp_config_modify(config, settings[i][0], settings[i][1]);
    ucp_params_t params = {.field_mask = UCP_PARAM_FIELD_FEATURES |
                                         UCP_PARAM_FIELD_MT_WORKERS_SHARED | UCP_PARAM_FIELD_NAME,
                           .features = UCP_FEATURE_AM | UCP_FEATURE_WAKEUP |
                                       (reads ? (uint64_t)UCP_FEATURE_RMA : 0),
                           .mt_workers_shared = 1,
                           .name = "dray"};
    if (status == UCS_OK)
        status = library.ucp_init_version(UCP_API_MAJOR, UCP_API_MINOR, &params, config, out);
    library.ucp_config_release(config);
    return status;
}

static int add(const char *devices, bool reads, struct shared **out, dray_error *error)
{
    struct shared *shared = calloc(1, sizeof *shared);
    if (shared)
        shared->devices = strdup(devices);
    if (!shared || !shared->devices) {
        free(shared);
        return dray__nomem(error);
    }
    ucs_status_t status = make(devices, reads, &shared->context);
    if (status != UCS_OK) {
        free(shared->devices);
        free(shared);
        char what[300];
        snprintf(what, sizeof what, "%s on %.200s", dray__ucx_transports(), devices);
        return dray__ucx_fail(error, status, what);
    }
    shared->reads = reads;
    shared->next = all;
    all = shared;
    atomic_store(&owner, getpid());
    *out = shared;
    return DRAY_OK;
}

int dray__ucx_context_get(const char *devices, bool reads, ucp_context_h *out, dray_error *error)
{
    int rc = DRAY_OK;
    /* Without the lock, which may be held for ever in a child. */
    const pid_t pid = atomic_load(&owner);
    if (pid && pid != getpid())
        return dray__fail(error, DRAY_EUNSUPPORTED,
                          "UCX was in use when this process was forked: it is not usable in it");
    pthread_mutex_lock(&lock);
    struct shared *shared = all;
    while (shared && (strcmp(shared->devices, devices) != 0 || shared->reads != reads))
        shared = shared->next;
    if (!shared)
        rc = add(devices, reads, &shared, error);
    if (rc == DRAY_OK) {
        shared->users++;
        *out = shared->context;
    }
    pthread_mutex_unlock(&lock);
    return rc;
}

void dray__ucx_context_hold(ucp_context_h context)
{
    pthread_mutex_lock(&lock);
    for (struct shared *shared = all; shared; shared = shared->next)
        shared->users += shared->context == context;
    pthread_mutex_unlock(&lock);
}

void dray__ucx_context_put(ucp_context_h context)
{
    pthread_mutex_lock(&lock);
    struct shared **link = &all;
    while (*link && (*link)->context != context)
        link = &(*link)->next;
    struct shared *shared = *link;
    if (shared && --shared->users == 0) {
        *link = shared->next;
        if (!all)
            atomic_store(&owner, 0);
        library.ucp_cleanup(shared->context);
        free(shared->devices);
        free(shared);
    }
    pthread_mutex_unlock(&lock);
}
#endif
