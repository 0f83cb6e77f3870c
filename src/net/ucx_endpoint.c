/* One end of a connection through UCX: its bytes and its one-sided reads (ucx.h). */
#ifdef DRAY_HAVE_UCX
#include "base/error.h"
#include "net/ucx.h"

#include <arpa/inet.h>
#include <dirent.h>
#include <errno.h>
#include <ifaddrs.h>
#include <inttypes.h>
#include <netinet/in.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

enum {
    SENDS = 4,         /* the most messages under way */
    MESSAGE_ID = 0x44, /* of dray's active messages; each worker has its own */
    /* The bytes of one; with its header it fits a segment of UCX's TCP transport. */
    MESSAGE = 240 << 10,
    QUEUE_MAX = 8 << 20, /* the most received bytes that have not been taken */
    QUIET_TURNS = 1000,  /* rounds of progress before giving up on a worker that cannot be armed */
    CLOSE_MS = 100,
    /* The room for a packed key. UCX gets no length of it, because a key itself has the number of
     * its pieces, so keys are padded with zeros in case one is incomplete. A key has a bit for each
     * of 64 domains, for each domain a size of one byte and its bytes, and the additions of later
     * versions. */
    KEY_ROOM = 40 << 10
};

struct header {
    uint64_t nonce, sequence;
};

struct sending {
    dray__ucx *ucx;
    uint8_t *data;
    size_t capacity;
    struct header header;
    bool busy;
};

struct arrived { /* bytes that arrived before the caller received them */
    struct arrived *next;
    size_t size, at;
    uint8_t data[];
};

struct dray__ucx {
    const dray__ucx_library *library;
    pid_t pid;
    bool reads;                 /* one-sided reads were agreed on */
    struct dray__net_key *keys; /* keys of the other side, until it is closed */
    ucp_context_h context;
    ucp_worker_h worker;
    ucp_ep_h endpoint;
    ucp_address_t *address;
    size_t address_size;
    int fd;
    int failed; /* -errno */
    bool armed;
    uint64_t nonce, other_nonce, sent, received;
    struct sending sends[SENDS];
    struct arrived *first, **last;
    size_t queued;
    uint8_t *want; /* the caller's buffer, while it receives */
    size_t want_size, want_have;
};

struct dray__net_key {
    struct dray__net_key *next;
    ucp_rkey_h handle;
};

/* ---- devices --------------------------------------------------------------------------------- */

static bool same_address(const struct sockaddr *a, const struct sockaddr *b)
{
    if (a->sa_family != b->sa_family)
        return false;
    if (a->sa_family == AF_INET)
        return ((const struct sockaddr_in *)a)->sin_addr.s_addr ==
               ((const struct sockaddr_in *)b)->sin_addr.s_addr;
    return a->sa_family == AF_INET6 &&
           memcmp(&((const struct sockaddr_in6 *)a)->sin6_addr,
                  &((const struct sockaddr_in6 *)b)->sin6_addr, 16) == 0;
}

static bool device_of(int fd, char *out, size_t size)
{
    struct sockaddr_storage own;
    socklen_t bytes = sizeof own;
    struct ifaddrs *list = NULL;
    if (getsockname(fd, (struct sockaddr *)&own, &bytes) || getifaddrs(&list))
        return false;
    const struct ifaddrs *i = list;
    while (i && !(i->ifa_addr && same_address(i->ifa_addr, (const struct sockaddr *)&own)))
        i = i->ifa_next;
    if (i)
        snprintf(out, size, "%s", i->ifa_name);
    freeifaddrs(list);
    return i != NULL;
}

/* Appends the ports of RDMA devices, "mlx5_0:1", to `out`. */
static void add_rdma(char *out, size_t size)
{
    DIR *dir = opendir("/sys/class/infiniband");
    for (const struct dirent *entry; dir && (entry = readdir(dir));) {
        size_t used = strlen(out);
        if (entry->d_name[0] != '.')
            snprintf(out + used, size - used, ",%.60s:1", entry->d_name);
    }
    if (dir)
        closedir(dir);
}

/* ---- callbacks ------------------------------------------------------------------------------- */

static void peer_failed(void *user, ucp_ep_h endpoint, ucs_status_t status)
{
    dray__ucx *x = user;
    (void)endpoint;
    (void)status; /* UCX reports "Endpoint timeout" for every reason */
    x->failed = -ECONNRESET;
}

static void sent(void *request, ucs_status_t status, void *user)
{
    struct sending *sending = user;
    sending->busy = false;
    if (status != UCS_OK && !sending->ucx->failed)
        sending->ucx->failed = -ECONNRESET;
    sending->ucx->library->ucp_request_free(request);
}

static int keep(dray__ucx *x, const uint8_t *data, size_t size)
{
    struct arrived *arrived = x->queued + size <= QUEUE_MAX ? malloc(sizeof *arrived + size) : NULL;
    if (!arrived)
        return -ENOBUFS;
    *arrived = (struct arrived){.size = size};
    memcpy(arrived->data, data, size);
    *x->last = arrived;
    x->last = &arrived->next;
    x->queued += size;
    return 0;
}

/* Receives a message. Any process on the network can send to a worker, so a message without the
 * right number is dropped. */
static ucs_status_t came(void *user, const void *header, size_t header_size, void *data,
                         size_t size, const ucp_am_recv_param_t *param)
{
    dray__ucx *x = user;
    struct header h;
    if (header_size != sizeof h)
        return UCS_OK;
    memcpy(&h, header, sizeof h);
    if (h.nonce != x->nonce)
        return UCS_OK;
    if (h.sequence != x->received++ || (param->recv_attr & UCP_AM_RECV_ATTR_FLAG_RNDV)) {
        x->failed = -EPROTO;
        return UCS_OK;
    }
    size_t room = x->first ? 0 : x->want_size - x->want_have;
    size_t direct = size < room ? size : room;
    if (direct)
        memcpy(x->want + x->want_have, data, direct);
    x->want_have += direct;
    if (direct < size && !x->failed)
        x->failed = keep(x, (const uint8_t *)data + direct, size - direct);
    return UCS_OK;
}

/* ---- opening and closing --------------------------------------------------------------------- */

static ucs_status_t make_worker(dray__ucx *x)
{
    const dray__ucx_library *l = x->library;
    ucp_worker_params_t params = {.field_mask = UCP_WORKER_PARAM_FIELD_THREAD_MODE |
                                                UCP_WORKER_PARAM_FIELD_EVENTS,
                                  .thread_mode = UCS_THREAD_MODE_SERIALIZED,
                                  .events = UCP_WAKEUP_TX | UCP_WAKEUP_RX};
    ucp_am_handler_param_t handler = {.field_mask = UCP_AM_HANDLER_PARAM_FIELD_ID |
                                                    UCP_AM_HANDLER_PARAM_FIELD_CB |
                                                    UCP_AM_HANDLER_PARAM_FIELD_ARG,
                                      .id = MESSAGE_ID,
                                      .cb = came,
                                      .arg = x};
    ucs_status_t status = l->ucp_worker_create(x->context, &params, &x->worker);
    if (status == UCS_OK)
        status = l->ucp_worker_set_am_recv_handler(x->worker, &handler);
    if (status == UCS_OK)
        status = l->ucp_worker_get_address(x->worker, &x->address, &x->address_size);
    if (status == UCS_OK)
        status = l->ucp_worker_get_efd(x->worker, &x->fd);
    return status;
}

int dray__ucx_open(int fd, bool reads, dray__ucx **out, dray_error *error)
{
    char devices[512];
    const dray__ucx_library *library = dray__ucx_library_get();
    dray__ucx_version version;
    if (!library)
        return dray__ucx_find(&version, error);
    if (!device_of(fd, devices, sizeof devices))
        return dray__fail(error, DRAY_ENOENT, "UCX: no network device has the socket's address");
    add_rdma(devices, sizeof devices);
    dray__ucx *x = calloc(1, sizeof *x);
    if (!x)
        return dray__nomem(error);
    x->library = library;
    x->reads = reads;
    x->pid = getpid();
    x->last = &x->first;
    int rc = getrandom(&x->nonce, sizeof x->nonce, 0) == sizeof x->nonce
                 ? dray__ucx_context_get(devices, reads, &x->context, error)
                 : dray__fail_errno(error, errno, "random bytes");
    ucs_status_t status = rc ? UCS_OK : make_worker(x);
    if (status != UCS_OK)
        rc = dray__ucx_fail(error, status, "a worker");
    if (rc == DRAY_OK && x->address_size > DRAY__UCX_ADDRESS_MAX)
        rc = dray__fail(error, DRAY_EUNSUPPORTED, "UCX: a worker's address of %zu bytes",
                        x->address_size);
    if (rc)
        dray__ucx_close(x);
    else
        *out = x;
    return rc;
}

static void close_endpoint(dray__ucx *x)
{
    const dray__ucx_library *l = x->library;
    ucp_request_param_t param = {.op_attr_mask = UCP_OP_ATTR_FIELD_FLAGS,
                                 .flags = UCP_EP_CLOSE_FLAG_FORCE};
    void *request = l->ucp_ep_close_nbx(x->endpoint, &param);
    for (int i = 0; i < CLOSE_MS && UCS_PTR_IS_PTR(request); i++) {
        while (l->ucp_worker_progress(x->worker))
            ;
        if (l->ucp_request_check_status(request) != UCS_INPROGRESS)
            break;
        nanosleep(&(struct timespec){.tv_nsec = 1000000}, NULL);
    }
    if (UCS_PTR_IS_PTR(request))
        l->ucp_request_free(request);
}

static void forget_keys(dray__ucx *x)
{
    while (x->keys) {
        struct dray__net_key *next = x->keys->next;
        x->library->ucp_rkey_destroy(x->keys->handle);
        free(x->keys);
        x->keys = next;
    }
}

void dray__ucx_close(dray__ucx *x)
{
    if (!x)
        return;
    if (x->pid == getpid()) { /* in a forked child everything belongs to its parent */
        if (x->endpoint)
            close_endpoint(x);
        forget_keys(x);
        if (x->address)
            x->library->ucp_worker_release_address(x->worker, x->address);
        if (x->worker)
            x->library->ucp_worker_destroy(x->worker);
        if (x->context)
            dray__ucx_context_put(x->context);
    }
    while (x->first) {
        struct arrived *next = x->first->next;
        free(x->first);
        x->first = next;
    }
    for (int i = 0; i < SENDS; i++)
        free(x->sends[i].data);
    free(x);
}

const void *dray__ucx_address(const dray__ucx *x, size_t *size, uint64_t *number)
{
    *size = x->address_size;
    *number = x->nonce;
    return x->address;
}

int dray__ucx_connect(dray__ucx *x, const void *address, uint64_t number, dray_error *error)
{
    ucp_ep_params_t params = {.field_mask = UCP_EP_PARAM_FIELD_REMOTE_ADDRESS |
                                            UCP_EP_PARAM_FIELD_ERR_HANDLING_MODE |
                                            UCP_EP_PARAM_FIELD_ERR_HANDLER,
                              .address = address,
                              .err_mode = UCP_ERR_HANDLING_MODE_PEER,
                              .err_handler = {.cb = peer_failed, .arg = x}};
    ucs_status_t status = x->library->ucp_ep_create(x->worker, &params, &x->endpoint);
    if (status != UCS_OK)
        return dray__ucx_fail(error, status, "an endpoint");
    x->other_nonce = number;
    return DRAY_OK;
}

static dray__ucx *ucx_of(const dray__stream *stream)
{
    return ((dray__ucx_state *)stream->state)->ucx;
}

/* ---- bytes ----------------------------------------------------------------------------------- */

static bool progress(dray__ucx *x)
{
    for (int i = 0; i < QUIET_TURNS && !x->failed; i++) {
        x->armed = false;
        if (x->library->ucp_worker_progress(x->worker))
            return true;
        ucs_status_t status = x->library->ucp_worker_arm(x->worker);
        x->armed = status == UCS_OK;
        if (x->armed)
            return false;
        if (status != UCS_ERR_BUSY)
            x->failed = -EIO;
    }
    return false;
}

static struct sending *free_sending(dray__ucx *x)
{
    for (int i = 0; i < SENDS; i++)
        if (!x->sends[i].busy)
            return &x->sends[i];
    return NULL;
}

static int post(dray__ucx *x, struct sending *sending, const void *data, size_t size)
{
    if (sending->capacity < size) {
        uint8_t *grown = realloc(sending->data, size);
        if (!grown)
            return -ENOMEM;
        sending->data = grown;
        sending->capacity = size;
    }
    memcpy(sending->data, data, size);
    sending->ucx = x;
    sending->header = (struct header){x->other_nonce, x->sent};
    ucp_request_param_t param = {.op_attr_mask = UCP_OP_ATTR_FIELD_CALLBACK |
                                                 UCP_OP_ATTR_FIELD_USER_DATA |
                                                 UCP_OP_ATTR_FIELD_FLAGS,
                                 .cb.send = sent,
                                 .user_data = sending,
                                 .flags = UCP_AM_SEND_FLAG_EAGER};
    x->armed = false;
    void *request =
        x->library->ucp_am_send_nbx(x->endpoint, MESSAGE_ID, &sending->header,
                                    sizeof sending->header, sending->data, size, &param);
    if (UCS_PTR_IS_ERR(request))
        return -ECONNRESET;
    sending->busy = request != NULL;
    x->sent++;
    return 0;
}

/* Checks the socket, over which nothing is received any more except its end. */
static ssize_t silence(const dray__stream *stream)
{
    uint8_t byte;
    ssize_t n = recv(stream->socket, &byte, 1, MSG_PEEK | MSG_DONTWAIT);
    return n < 0 ? -(errno == EINTR ? EAGAIN : errno) : n > 0 ? -EPROTO : 0;
}

ssize_t dray__ucx_send(dray__stream *stream, const void *data, size_t size, bool more)
{
    dray__ucx *x = ucx_of(stream);
    struct sending *sending = NULL;
    (void)more;
    while (!x->failed && !(sending = free_sending(x)))
        if (!progress(x) && !x->failed && !free_sending(x)) {
            ssize_t over = silence(stream);
            return over ? over : -ECONNRESET;
        }
    if (x->failed)
        return x->failed;
    if (size > MESSAGE)
        size = MESSAGE;
    int rc = post(x, sending, data, size);
    return rc ? rc : (ssize_t)size;
}

static size_t take_queued(dray__ucx *x, uint8_t *data, size_t size)
{
    size_t taken = 0;
    while (x->first && taken < size) {
        struct arrived *arrived = x->first;
        size_t part = arrived->size - arrived->at;
        if (part > size - taken)
            part = size - taken;
        memcpy(data + taken, arrived->data + arrived->at, part);
        taken += part;
        arrived->at += part;
        x->queued -= part;
        if (arrived->at < arrived->size)
            break;
        x->first = arrived->next;
        if (!x->first)
            x->last = &x->first;
        free(arrived);
    }
    return taken;
}

ssize_t dray__ucx_recv(dray__stream *stream, void *data, size_t size)
{
    dray__ucx *x = ucx_of(stream);
    size_t taken = take_queued(x, data, size);
    if (taken)
        return (ssize_t)taken;
    x->want = data;
    x->want_size = size;
    x->want_have = 0;
    while (!x->want_have && progress(x))
        ;
    taken = x->want_have;
    x->want_size = x->want_have = 0;
    if (taken)
        return (ssize_t)taken;
    return x->failed ? x->failed : silence(stream);
}

int dray__ucx_flush(dray__stream *stream)
{
    dray__ucx *x = ucx_of(stream);
    for (int i = 0; i < SENDS; i++)
        while (x->sends[i].busy && !x->failed)
            if (!progress(x) && x->sends[i].busy)
                return x->failed ? x->failed : -EAGAIN;
    return x->failed;
}

int dray__ucx_fd(const dray__ucx *x)
{
    return x->fd;
}

bool dray__ucx_pending(const dray__stream *stream)
{
    const dray__ucx_state *state = stream->state;
    const dray__ucx *x = state->ucx;
    return !state->talk && (x->first || !x->armed || x->failed);
}

/* ---- one-sided reads ------------------------------------------------------------------------- */

struct memory {
    dray__net_memory base;
    const dray__ucx_library *library;
    ucp_context_h context;
    ucp_mem_h handle;
};

int dray__ucx_map(const dray__stream *stream, void *base, size_t bytes, bool remote,
                  dray__net_memory **out, dray_error *error)
{
    const dray__ucx *x = ucx_of(stream);
    struct memory *memory = calloc(1, sizeof *memory);
    if (!memory)
        return dray__nomem(error);
    ucp_mem_map_params_t params = {
        .field_mask = UCP_MEM_MAP_PARAM_FIELD_ADDRESS | UCP_MEM_MAP_PARAM_FIELD_LENGTH |
                      UCP_MEM_MAP_PARAM_FIELD_PROT,
        .address = base,
        .length = bytes,
        .prot = remote ? UCP_MEM_MAP_PROT_LOCAL_READ | UCP_MEM_MAP_PROT_REMOTE_READ
                       : UCP_MEM_MAP_PROT_LOCAL_READ | UCP_MEM_MAP_PROT_LOCAL_WRITE};
    ucs_status_t status = x->library->ucp_mem_map(x->context, &params, &memory->handle);
    if (status != UCS_OK) {
        free(memory);
        return dray__ucx_fail(error, status, "registering memory");
    }
    memory->library = x->library;
    memory->context = x->context;
    dray__ucx_context_hold(x->context);
    memory->base.carrier = &dray__carrier_ucx_reads;
    *out = &memory->base;
    return DRAY_OK;
}

void dray__ucx_unmap(dray__net_memory *registered)
{
    struct memory *memory = (struct memory *)registered;
    memory->library->ucp_mem_unmap(memory->context, memory->handle);
    dray__ucx_context_put(memory->context);
    free(memory);
}

int dray__ucx_pack_key(const dray__net_memory *registered, void **out, size_t *size,
                       dray_error *error)
{
    const struct memory *memory = (const struct memory *)registered;
    void *packed;
    ucs_status_t status =
        memory->library->ucp_rkey_pack(memory->context, memory->handle, &packed, size);
    if (status != UCS_OK)
        return dray__ucx_fail(error, status, "a key of registered memory");
    *out = malloc(*size + 1);
    if (*out)
        memcpy(*out, packed, *size);
    memory->library->ucp_rkey_buffer_release(packed);
    return *out ? DRAY_OK : dray__nomem(error);
}

int dray__ucx_unpack_key(dray__stream *stream, const void *packed, size_t size, dray__net_key **out,
                         dray_error *error)
{
    dray__ucx *x = ucx_of(stream);
    if (size == 0 || size > KEY_ROOM / 2)
        return dray__fail(error, DRAY_EFORMAT, "a key of registered memory in %zu bytes", size);
    dray__net_key *key = calloc(1, sizeof *key);
    uint8_t *room = calloc(1, KEY_ROOM);
    int rc = key && room ? DRAY_OK : dray__nomem(error);
    if (rc == DRAY_OK) {
        memcpy(room, packed, size);
        ucs_status_t status = x->library->ucp_ep_rkey_unpack(x->endpoint, room, &key->handle);
        if (status != UCS_OK)
            rc = dray__ucx_fail(error, status, "a key of the other side's memory");
    }
    free(room);
    if (rc) {
        free(key);
        return rc;
    }
    key->next = x->keys;
    x->keys = key;
    *out = key;
    return DRAY_OK;
}

void dray__ucx_forget_keys(dray__stream *stream)
{
    forget_keys(ucx_of(stream));
}

static void landed(void *request, ucs_status_t status, void *user)
{
    dray__net_reads *reads = user;
    (void)request;
    reads->pending--;
    reads->failed |= status != UCS_OK;
}

/* The same for a request that UCX allocated. */
static void landed_later(void *request, ucs_status_t status, void *user)
{
    dray__ucx_library_get()->ucp_request_free(request);
    landed(request, status, user);
}

int dray__ucx_get(dray__stream *stream, const dray__net_key *key, uint64_t address,
                  const dray__net_memory *into, void *at, size_t bytes, dray__net_reads *reads,
                  dray_error *error)
{
    dray__ucx *x = ucx_of(stream);
    ucp_request_param_t param = {.op_attr_mask = UCP_OP_ATTR_FIELD_CALLBACK |
                                                 UCP_OP_ATTR_FIELD_USER_DATA |
                                                 UCP_OP_ATTR_FIELD_MEMH,
                                 .cb.send = landed_later,
                                 .user_data = reads,
                                 .memh = ((const struct memory *)into)->handle};
    x->armed = false;
    reads->pending++;
    void *request = x->library->ucp_get_nbx(x->endpoint, at, bytes, address, key->handle, &param);
    if (!UCS_PTR_IS_PTR(request))
        landed(NULL, UCS_PTR_STATUS(request), reads);
    return UCS_PTR_IS_ERR(request)
               ? dray__ucx_fail(error, UCS_PTR_STATUS(request), "a one-sided read")
               : DRAY_OK;
}

int dray__ucx_read(dray__stream *stream, const dray__net_reads *reads)
{
    dray__ucx *x = ucx_of(stream);
    while (reads->pending && !x->failed && progress(x))
        ;
    if (x->failed || reads->failed)
        return x->failed ? x->failed : -ECONNRESET;
    return reads->pending ? -EAGAIN : 0;
}
#endif
