/* One-sided reads through UCX (ucx.h). */
#ifdef DRAY_HAVE_UCX
#include "base/error.h"
#include "mover/ucx_connection.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

/* UCX is not told how long a packed key is, and a key says itself how many pieces it has: one
 * that lies is read into zeros. A bit for each of 64 domains, of each a size in a byte and so many
 * bytes, and what later versions add. */
enum { KEY_ROOM = 40 << 10 };

struct dray__ucx_memory {
    const dray__ucx_library *library;
    ucp_context_h context;
    ucp_mem_h handle;
};

struct dray__ucx_key {
    struct dray__ucx_key *next;
    ucp_rkey_h handle;
};

int dray__ucx_map(const dray__ucx *x, void *base, size_t bytes, bool remote, dray__ucx_memory **out,
                  dray_error *error)
{
    dray__ucx_memory *memory = calloc(1, sizeof *memory);
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
    *out = memory;
    return DRAY_OK;
}

void dray__ucx_unmap(dray__ucx_memory *memory)
{
    if (!memory)
        return;
    memory->library->ucp_mem_unmap(memory->context, memory->handle);
    dray__ucx_context_put(memory->context);
    free(memory);
}

int dray__ucx_pack_key(const dray__ucx_memory *memory, void **out, size_t *size, dray_error *error)
{
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

int dray__ucx_unpack_key(dray__ucx *x, const void *packed, size_t size, dray__ucx_key **out,
                         dray_error *error)
{
    if (size == 0 || size > KEY_ROOM / 2)
        return dray__fail(error, DRAY_EFORMAT, "a key of registered memory in %zu bytes", size);
    dray__ucx_key *key = calloc(1, sizeof *key);
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

void dray__ucx_forget_keys(dray__ucx *x)
{
    while (x->keys) {
        struct dray__ucx_key *next = x->keys->next;
        x->library->ucp_rkey_destroy(x->keys->handle);
        free(x->keys);
        x->keys = next;
    }
}

static void landed(void *request, ucs_status_t status, void *user)
{
    dray__ucx_reads *reads = user;
    (void)request;
    reads->pending--;
    reads->failed |= status != UCS_OK;
}

/* As above, of a request that UCX allocated. */
static void landed_later(void *request, ucs_status_t status, void *user)
{
    dray__ucx_library_get()->ucp_request_free(request);
    landed(request, status, user);
}

int dray__ucx_get(dray__ucx *x, const dray__ucx_key *key, uint64_t address,
                  const dray__ucx_memory *into, void *at, size_t bytes, dray__ucx_reads *reads,
                  dray_error *error)
{
    ucp_request_param_t param = {.op_attr_mask = UCP_OP_ATTR_FIELD_CALLBACK |
                                                 UCP_OP_ATTR_FIELD_USER_DATA |
                                                 UCP_OP_ATTR_FIELD_MEMH,
                                 .cb.send = landed_later,
                                 .user_data = reads,
                                 .memh = into->handle};
    x->armed = false;
    reads->pending++;
    void *request = x->library->ucp_get_nbx(x->endpoint, at, bytes, address, key->handle, &param);
    if (!UCS_PTR_IS_PTR(request))
        landed(NULL, UCS_PTR_STATUS(request), reads);
    return UCS_PTR_IS_ERR(request)
               ? dray__ucx_fail(error, UCS_PTR_STATUS(request), "a one-sided read")
               : DRAY_OK;
}

int dray__ucx_read(dray__ucx *x, const dray__ucx_reads *reads)
{
    while (reads->pending && !x->failed && dray__ucx_progress(x))
        ;
    if (x->failed || reads->failed)
        return x->failed ? x->failed : -ECONNRESET;
    return reads->pending ? -EAGAIN : 0;
}
#endif
