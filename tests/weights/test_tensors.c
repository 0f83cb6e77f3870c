/* Tests lists of handles, one for each rank, as frameworks pass them to update_weights_from_tensor.
 * There are two processes and a socket between them, and values are checked element by element. */
#include "suite.h"
#include "weights/cluster.h"

#include <stdint.h>
#include <sys/socket.h>

enum { RANKS = 2, SEED = 5, FDS = 8 };

static dray_layout *full_of(const dray_model_config *config, dray_dtype dtype)
{
    dray_layout *l;
    MUST(dray_layout_full(config, dtype, DRAY_REGION_SHARED, &l, error));
    return l;
}

/* All tensors of `ranks` copies of the model, each in a region of its own. */
static dray_tensor_list *make_list(const dray_layout *l, dray_region **regions, uint32_t ranks)
{
    dray_tensor_list *list;
    MUST(dray_tensor_list_new("direct", 1, &list, error));
    for (uint32_t b = 0; b < dray_layout_block_count(l); b++) {
        const dray_block *block = dray_layout_block(l, b);
        const dray_tensor_info *t = dray_layout_tensor(l, block->tensor);
        dray_handle handles[RANKS];
        int fds[RANKS];
        for (uint32_t r = 0; r < ranks; r++) {
            handles[r] = (dray_handle)DRAY_HANDLE_INIT;
            handles[r].dtype = t->dtype;
            handles[r].ndim = t->ndim;
            handles[r].offset = block->offset;
            memcpy(handles[r].shape, block->extent, sizeof block->extent);
            memcpy(handles[r].stride, block->stride, sizeof block->stride);
            for (uint32_t d = t->ndim; d < DRAY_MAX_DIMS; d++)
                handles[r].shape[d] = handles[r].stride[d] = 0;
            MUST(dray_handle_describe(regions[r], &handles[r], error));
            fds[r] = dray_region_fd(regions[r]);
        }
        MUST(dray_tensor_list_add(list, t->name, handles, fds, ranks, error));
    }
    return list;
}

static void send_list(int to, const dray_tensor_list *list)
{
    void *data;
    size_t size;
    const int *fds;
    uint32_t count;
    MUST(dray_tensor_list_pack(list, &data, &size, &fds, &count, error));
    CHECK(count == RANKS); /* one descriptor a storage, not one a tensor */
    union {
        char room[CMSG_SPACE(sizeof(int) * FDS)];
        struct cmsghdr align;
    } control = {{0}};
    struct iovec part = {&size, sizeof size};
    struct msghdr m = {.msg_iov = &part,
                       .msg_iovlen = 1,
                       .msg_control = control.room,
                       .msg_controllen = CMSG_SPACE(sizeof(int) * count)};
    struct cmsghdr *c = CMSG_FIRSTHDR(&m);
    c->cmsg_level = SOL_SOCKET;
    c->cmsg_type = SCM_RIGHTS;
    c->cmsg_len = CMSG_LEN(sizeof(int) * count);
    memcpy(CMSG_DATA(c), fds, sizeof(int) * count);
    CHECK(sendmsg(to, &m, 0) == (ssize_t)sizeof size);
    CHECK(send(to, data, size, 0) == (ssize_t)size);
    free(data);
}

static void *receive_list(int from, size_t *size, int *fds, uint32_t *count)
{
    union {
        char room[CMSG_SPACE(sizeof(int) * FDS)];
        struct cmsghdr align;
    } control = {{0}};
    struct iovec part = {size, sizeof *size};
    struct msghdr m = {.msg_iov = &part,
                       .msg_iovlen = 1,
                       .msg_control = control.room,
                       .msg_controllen = sizeof control.room};
    CHECK(recvmsg(from, &m, MSG_WAITALL) == (ssize_t)sizeof *size);
    struct cmsghdr *c = CMSG_FIRSTHDR(&m);
    *count = (uint32_t)((c->cmsg_len - CMSG_LEN(0)) / sizeof(int));
    memcpy(fds, CMSG_DATA(c), *count * sizeof(int));
    char *data = malloc(*size);
    CHECK(recv(from, data, *size, MSG_WAITALL) == (ssize_t)*size);
    return data;
}

typedef struct scene {
    dray_model_config config;
    int socket;
} scene;

/* Entry i holds values of its own, so that a wrong one is seen. */
static void run_sender(void *user)
{
    const scene *s = user;
    dray_layout *l = full_of(&s->config, DRAY_F32);
    dray_region *regions[RANKS];
    char done;
    for (uint32_t r = 0; r < RANKS; r++) {
        MUST(dray_regions_for_layout(l, 1, &regions[r], error));
        fill(l, &regions[r], true, SEED + r);
    }
    dray_tensor_list *list = make_list(l, regions, RANKS);
    send_list(s->socket, list);
    CHECK(recv(s->socket, &done, 1, 0) == 1);
    dray_tensor_list_free(list);
    for (uint32_t r = 0; r < RANKS; r++)
        dray_region_free(regions[r]);
    dray_layout_free(l);
}

/* The mapped tensor, as the engine's own load_weights gets it. */
static void check_opened(dray_tensor_list *list, uint32_t rank)
{
    for (uint32_t i = 0; i < dray_tensor_list_count(list); i++) {
        const char *name;
        dray_region *region;
        dray_handle h = DRAY_HANDLE_INIT;
        MUST(dray_tensor_list_open(list, i, rank, &name, &h, &region, error));
        uint32_t found, right = value_f32(name_hash(name, true), 0, SEED + rank);
        memcpy(&found, (const uint8_t *)dray_region_base(region) + h.offset, sizeof found);
        CHECK(found == right && h.dtype == DRAY_F32);
    }
}

static void check_loaded(dray_tensor_list *list, const dray_model_config *config, uint32_t rank)
{
    dray_engine_spec spec = DRAY_ENGINE_SPEC_INIT;
    dray_layout *l;
    dray_region *region;
    spec.tp = RANKS;
    spec.tp_rank = rank;
    spec.dtype = DRAY_BF16;
    MUST(dray_layout_engine(config, &spec, &l, error));
    MUST(dray_regions_for_layout(l, 1, &region, error));
    poison(l, &region);
    MUST(dray_tensor_list_load(list, rank, l, &region, error));
    CHECK(wrong_elements(l, &region, true, SEED + rank, DRAY_F32) == 0);
    dray_region_free(region);
    dray_layout_free(l);
}

TEST(crosses_processes)
{
    scene s = {.config = small_config(true, 1)};
    int ends[2], fds[FDS];
    size_t size;
    uint32_t count;
    CHECK(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends) == 0);
    s.socket = ends[0];
    pid_t pid = spawn(run_sender, &s);
    void *data = receive_list(ends[1], &size, fds, &count);
    dray_tensor_list *list;
    MUST(dray_tensor_list_unpack(data, size, fds, count, &list, error));
    for (uint32_t i = 0; i < count; i++)
        close(fds[i]);
    assert_string_equal(dray_tensor_list_load_format(list), "direct");
    assert_int_equal(dray_tensor_list_flush_cache(list), 1);
    assert_int_equal(dray_tensor_list_ranks(list), RANKS);
    for (uint32_t r = 0; r < RANKS; r++) {
        check_opened(list, r);
        check_loaded(list, &s.config, r);
    }
    dray_error e;
    assert_int_equal(dray_tensor_list_open(list, 0, RANKS, NULL, NULL, NULL, &e), DRAY_EINVALID);
    assert_int_equal(dray_tensor_list_open(list, 1000, 0, NULL, NULL, NULL, &e), DRAY_EINVALID);
    assert_int_equal(send(ends[1], "", 1, 0), 1);
    must_end_well(pid);
    dray_tensor_list_free(list);
    free(data);
    close(ends[0]);
    close(ends[1]);
}

/* ---- one process: parts, bad input ----------------------------------------------------------- */

TEST(loads_parts_and_nothing_else)
{
    dray_model_config config = small_config(true, 2);
    dray_layout *l = full_of(&config, DRAY_F32), *few, *to = full_of(&config, DRAY_F32);
    dray_region *regions[RANKS], *into;
    MUST(dray_regions_for_layout(l, 1, &regions[0], error));
    fill(l, regions, true, SEED);
    MUST(dray_regions_for_layout(to, 1, &into, error));
    poison(to, &into);
    config.layers = 1;
    few = full_of(&config, DRAY_F32);
    dray_tensor_list *list = make_list(l, regions, 1);
    dray_error e;
    /* a destination that has fewer tensors: unknown names change nothing */
    dray_region *small;
    MUST(dray_regions_for_layout(few, 1, &small, error));
    poison(few, &small);
    assert_int_equal(dray_tensor_list_load(list, 0, few, &small, &e), DRAY_ENOENT);
    assert_non_null(strstr(e.message, "model.layers.1."));
    for (uint64_t i = 0; i < dray_region_bytes(small); i++)
        assert_int_equal(((uint8_t *)dray_region_base(small))[i], 0xA5);
    dray_tensor_list_free(list);
    /* one layer's tensors: the other layer's stay as they were */
    MUST(dray_regions_for_layout(few, 1, &regions[1], error));
    fill(few, &regions[1], true, SEED);
    list = make_list(few, &regions[1], 1);
    MUST(dray_tensor_list_load(list, 0, to, &into, error));
    for (uint32_t b = 0; b < dray_layout_block_count(to); b++) {
        const dray_block *block = dray_layout_block(to, b);
        const char *name = dray_layout_tensor(to, block->tensor)->name;
        uint32_t found, index,
            right = dray_layout_find(few, name, &index, NULL)
                        ? 0xA5A5A5A5u
                        : value_f32(name_hash(name, true), 0, SEED);
        memcpy(&found, (uint8_t *)dray_region_base(into) + block->offset, sizeof found);
        assert_int_equal(found, right);
    }
    dray_tensor_list_free(list);
    dray_region_free(small);
    dray_region_free(into);
    dray_region_free(regions[0]);
    dray_region_free(regions[1]);
    dray_layout_free(l);
    dray_layout_free(few);
    dray_layout_free(to);
}

/* Every byte altered, every truncation: refused; descriptors that are missing or others: refused.
 */
TEST(refuses_what_is_not_one)
{
    dray_model_config config = small_config(true, 2);
    config.layers = 1;
    dray_layout *l = full_of(&config, DRAY_F32);
    dray_region *regions[RANKS], *other;
    for (uint32_t r = 0; r < RANKS; r++)
        MUST(dray_regions_for_layout(l, 1, &regions[r], error));
    MUST(dray_region_alloc(DRAY_REGION_SHARED, 4096, "other", &other, error));
    dray_tensor_list *list = make_list(l, regions, RANKS), *back = NULL;
    void *data;
    size_t size;
    const int *fds;
    uint32_t count;
    dray_error e;
    MUST(dray_tensor_list_pack(list, &data, &size, &fds, &count, error));
    uint8_t *bytes = data;
    for (size_t i = 0; i < size; i += i < 64 ? 1 : 7) {
        bytes[i] ^= 0x10;
        assert_true(dray_tensor_list_unpack(data, size, fds, count, &back, &e) < 0);
        bytes[i] ^= 0x10;
        assert_true(dray_tensor_list_unpack(data, i, fds, count, &back, &e) < 0);
    }
    assert_int_equal(dray_tensor_list_unpack(data, size, fds, 1, &back, &e), DRAY_EINVALID);
    int wrong[RANKS] = {fds[0], dray_region_fd(other)};
    MUST(dray_tensor_list_unpack(data, size, wrong, RANKS, &back, error));
    assert_int_equal(dray_tensor_list_open(back, 0, 0, NULL, NULL, NULL, &e), DRAY_OK);
    assert_int_equal(dray_tensor_list_open(back, 0, 1, NULL, NULL, NULL, &e), DRAY_EINVALID);
    dray_tensor_list_free(back);

    dray_handle h[RANKS] = {DRAY_HANDLE_INIT, DRAY_HANDLE_INIT};
    int both[RANKS] = {dray_region_fd(regions[0]), dray_region_fd(regions[1])},
        none[RANKS] = {-1, -1};
    for (uint32_t r = 0; r < RANKS; r++) {
        h[r].dtype = r ? DRAY_F32 : DRAY_BF16;
        h[r].ndim = 1;
        h[r].shape[0] = 4;
        h[r].stride[0] = 4;
        MUST(dray_handle_describe(regions[r], &h[r], error));
    }
    assert_int_equal(dray_tensor_list_add(list, "new", h, both, RANKS, &e), DRAY_EINVALID);
    assert_non_null(strstr(e.message, "several dtypes"));
    h[0].dtype = DRAY_F32;
    assert_int_equal(dray_tensor_list_add(list, "new", h, none, RANKS, &e), DRAY_EINVALID);
    assert_int_equal(dray_tensor_list_add(list, "new", h, both, 1, &e), DRAY_EINVALID);
    assert_int_equal(dray_tensor_list_add(list, "model.norm.weight", h, both, RANKS, &e),
                     DRAY_EEXIST);
    h[1].offset = h[1].storage_bytes; /* outside its storage */
    assert_int_equal(dray_tensor_list_add(list, "new", h, both, RANKS, &e), DRAY_EFORMAT);
    h[1].offset = 0;
    MUST(dray_tensor_list_add(list, "new", h, both, RANKS, error));
    free(data);
    dray_tensor_list_free(list);
    dray_region_free(other);
    for (uint32_t r = 0; r < RANKS; r++)
        dray_region_free(regions[r]);
    dray_layout_free(l);
}

SUITE(NULL, NULL)
