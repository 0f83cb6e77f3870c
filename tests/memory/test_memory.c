/* Tests regions of every kind, imports from another process, and handles that are whole, truncated,
 * altered and forged. */
#include <dray/memory.h>

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include "suite.h"

static char folder[PATH_MAX];

FIXTURE(make_folder)
{
    const char *tmp = getenv("TMPDIR");
    snprintf(folder, sizeof folder, "%s/dray-memory-XXXXXX", tmp && *tmp ? tmp : "/tmp");
    return mkdtemp(folder) ? 0 : -1;
}

FIXTURE(remove_folder)
{
    return rmdir(folder);
}

static void make_file(char *path, const char *name, size_t bytes)
{
    snprintf(path, PATH_MAX, "%.*s/%s", PATH_MAX - 64, folder, name);
    FILE *f = fopen(path, "wb");
    assert_non_null(f);
    for (size_t i = 0; i < bytes; i++)
        fputc((int)(i * 7 & 0xFF), f);
    assert_int_equal(fclose(f), 0);
}

TEST(allocated_memory_is_zeroed_and_writable)
{
    const dray_region_kind kinds[] = {DRAY_REGION_HOST, DRAY_REGION_SHARED};
    const uint64_t sizes[] = {0, 1, 4095, 4096, 4097, (2u << 20) - 1, (2u << 20) + 1, 9u << 20};
    for (size_t k = 0; k < 2; k++)
        for (size_t s = 0; s < sizeof sizes / sizeof *sizes; s++) {
            dray_region *r = NULL;
            dray_error e;
            assert_int_equal(dray_region_alloc(kinds[k], sizes[s], "weights", &r, &e), DRAY_OK);
            assert_int_equal(dray_region_bytes(r), sizes[s]);
            assert_int_equal(dray_region_get_kind(r), kinds[k]);
            assert_string_equal(dray_region_name(r), "weights");
            unsigned char *base = dray_region_base(r);
            assert_non_null(base);
            assert_int_equal((uintptr_t)base % 4096, 0);
            for (uint64_t i = 0; i < sizes[s]; i += 997)
                assert_int_equal(base[i], 0);
            if (sizes[s])
                memset(base, 0xA5, sizes[s]);
            assert_int_equal(dray_region_fd(r) >= 0, kinds[k] == DRAY_REGION_SHARED);
            dray_region_free(r);
        }
    dray_region_free(NULL);
}

TEST(kinds_that_are_missing_are_refused)
{
    dray_region *r = NULL;
    dray_error e;
    assert_int_equal(dray_region_alloc(DRAY_REGION_CUDA, 64, "x", &r, &e), DRAY_EUNSUPPORTED);
    assert_int_equal(dray_region_alloc(DRAY_REGION_FILE, 64, "x", &r, &e), DRAY_EUNSUPPORTED);
    assert_int_equal(dray_region_alloc((dray_region_kind)99, 64, "x", &r, &e), DRAY_EUNSUPPORTED);
    assert_int_equal(dray_region_alloc(DRAY_REGION_HOST, UINT64_MAX, "x", &r, &e), DRAY_ENOMEM);
    assert_int_equal(dray_region_alloc(DRAY_REGION_SHARED, UINT64_MAX, "x", &r, &e), DRAY_ENOMEM);
    assert_null(r);
}

TEST(shared_memory_has_a_sealed_size)
{
    dray_region *r;
    assert_int_equal(dray_region_alloc(DRAY_REGION_SHARED, 8192, "s", &r, NULL), DRAY_OK);
    int fd = dray_region_fd(r);
    assert_int_equal(ftruncate(fd, 4096), -1);
    assert_int_equal(ftruncate(fd, 1 << 20), -1);
    assert_true(fcntl(fd, F_GETFD) & FD_CLOEXEC);
    dray_region_free(r);
}

TEST(wrapped_memory_stays_its_owners)
{
    char *memory = malloc(100);
    memset(memory, 1, 100);
    dray_region *r = NULL;
    assert_int_equal(dray_region_wrap(memory, 100, NULL, &r, NULL), DRAY_OK);
    assert_ptr_equal(dray_region_base(r), memory);
    assert_int_equal(dray_region_fd(r), -1);
    dray_handle h = DRAY_HANDLE_INIT;
    assert_int_equal(dray_handle_describe(r, &h, NULL), DRAY_EUNSUPPORTED);
    dray_region_free(r);
    assert_int_equal(memory[99], 1);
    free(memory);
    assert_int_equal(dray_region_wrap(NULL, 1, "n", &r, NULL), DRAY_EINVALID);
    assert_int_equal(dray_region_wrap(&r, UINT64_MAX, "n", &r, NULL), DRAY_EINVALID);
}

TEST(files_must_be_regular_and_there)
{
    dray_region *r = NULL;
    dray_error e;
    char path[PATH_MAX];
    make_file(path, "data", 1000);
    assert_int_equal(dray_region_open(path, 0, &r, &e), DRAY_OK);
    assert_int_equal(dray_region_bytes(r), 1000);
    assert_null(dray_region_base(r));
    assert_true(dray_region_fd(r) >= 0);
    dray_region_free(r);
    unlink(path);
    r = NULL;
    assert_int_equal(dray_region_open(path, 0, &r, &e), DRAY_ENOENT);
    assert_non_null(strstr(e.message, path));
    assert_int_equal(dray_region_open(folder, 0, &r, &e), DRAY_EINVALID);
    assert_int_equal(dray_region_open("", 0, &r, &e), DRAY_EINVALID);
    assert_int_equal(mkfifo(path, 0600), 0); /* must not wait for a writer */
    assert_int_equal(dray_region_open(path, 0, &r, &e), DRAY_EINVALID);
    unlink(path);
    assert_null(r);
}

TEST(any_region_is_read_and_written)
{
    char path[PATH_MAX], own[1000];
    unsigned char data[300], back[300];
    make_file(path, "rw", 1000);
    dray_region *regions[5];
    assert_int_equal(dray_region_alloc(DRAY_REGION_HOST, 1000, "h", &regions[0], NULL), DRAY_OK);
    assert_int_equal(dray_region_alloc(DRAY_REGION_SHARED, 1000, "s", &regions[1], NULL), DRAY_OK);
    assert_int_equal(dray_region_wrap(own, 1000, "w", &regions[2], NULL), DRAY_OK);
    assert_int_equal(dray_region_open(path, 1, &regions[3], NULL), DRAY_OK);
    assert_int_equal(dray_region_open(path, 0, &regions[4], NULL), DRAY_OK);
    dray_region *nothing;
    assert_int_equal(dray_region_wrap(NULL, 0, "n", &nothing, NULL), DRAY_OK);
    assert_int_equal(dray_region_read(nothing, 0, back, 0, NULL), DRAY_OK);
    assert_int_equal(dray_region_write(nothing, 0, NULL, 0, NULL), DRAY_OK);
    dray_region_free(nothing);
    for (size_t i = 0; i < sizeof data; i++)
        data[i] = (unsigned char)(i * 11 + 3);
    for (int i = 0; i < 5; i++) {
        dray_region *r = regions[i];
        dray_error e;
        int rc = dray_region_write(r, 700, data, 300, &e);
        assert_int_equal(rc, i == 4 ? DRAY_EINVALID : DRAY_OK);
        memset(back, 0, sizeof back);
        assert_int_equal(dray_region_read(r, 700, back, 300, &e), DRAY_OK);
        assert_memory_equal(back, data, 300); /* the last one: what the one before wrote */
        assert_int_equal(dray_region_read(r, 1000, back, 0, &e), DRAY_OK);
        assert_int_equal(dray_region_read(r, 701, back, 300, &e), DRAY_EINVALID);
        assert_int_equal(dray_region_write(r, 1001, data, 0, &e), DRAY_EINVALID);
        assert_int_equal(dray_region_read(r, UINT64_MAX, back, 2, &e), DRAY_EINVALID);
        assert_int_equal(dray_region_check(r, &e), DRAY_OK);
        assert_int_equal(dray_region_device_address(r), 0);
        assert_int_equal(dray_region_device(r, back, &e), DRAY_EINVALID);
    }
    assert_int_equal(truncate(path, 800), 0);
    assert_int_equal(dray_region_read(regions[4], 700, back, 300, NULL), DRAY_EFORMAT);
    for (int i = 0; i < 5; i++)
        dray_region_free(regions[i]);
    unlink(path);
}

TEST(regions_of_a_layout_are_all_or_none)
{
    char path[PATH_MAX];
    make_file(path, "model", 500);
    dray_layout *l;
    uint32_t index;
    assert_int_equal(dray_layout_new(&l, NULL), DRAY_OK);
    dray_region_info infos[] = {{.kind = DRAY_REGION_HOST, .bytes = 100, .name = "a"},
                                {.kind = DRAY_REGION_SHARED, .bytes = 200, .name = "b"},
                                {.kind = DRAY_REGION_FILE, .bytes = 500, .name = path}};
    for (int i = 0; i < 3; i++)
        assert_int_equal(dray_layout_add_region(l, &infos[i], &index, NULL), DRAY_OK);
    dray_region *live[4];
    assert_int_equal(dray_regions_for_layout(l, 1, live, NULL), DRAY_OK);
    for (int i = 0; i < 3; i++) {
        assert_int_equal(dray_region_get_kind(live[i]), infos[i].kind);
        assert_int_equal(dray_region_bytes(live[i]), infos[i].bytes);
        dray_region_free(live[i]);
    }
    assert_int_equal(truncate(path, 499), 0);
    dray_error e;
    assert_int_equal(dray_regions_for_layout(l, 0, live, &e), DRAY_EFORMAT);
    assert_non_null(strstr(e.message, "499"));
    unlink(path);
    assert_int_equal(dray_regions_for_layout(l, 0, live, &e), DRAY_ENOENT);
    dray_layout_free(l);
}

/* ---- handles --------------------------------------------------------------------------------- */

static dray_handle described(const dray_region *r)
{
    dray_handle h = DRAY_HANDLE_INIT;
    h.dtype = DRAY_BF16;
    h.ndim = 2;
    h.shape[0] = 3, h.shape[1] = 5;
    h.stride[0] = 20, h.stride[1] = 2;
    h.offset = 8;
    h.owner_member = 42, h.owner_epoch = 7;
    dray_error e = {0};
    int rc = dray_handle_describe(r, &h, &e);
    if (rc)
        fail_msg("describe: %s", e.message);
    return h;
}

TEST(handles_round_trip)
{
    dray_region *shared, *file;
    char path[PATH_MAX];
    make_file(path, "h", 4096);
    assert_int_equal(dray_region_alloc(DRAY_REGION_SHARED, 4096, "s", &shared, NULL), DRAY_OK);
    assert_int_equal(dray_region_open(path, 0, &file, NULL), DRAY_OK);
    dray_region *both[] = {shared, file};
    for (int i = 0; i < 2; i++) {
        dray_handle h = described(both[i]), back = DRAY_HANDLE_INIT;
        unsigned char packed[1024];
        size_t size = dray_handle_packed_size();
        assert_true(size <= sizeof packed);
        assert_int_equal(dray_handle_pack(&h, packed, size - 1, NULL), DRAY_EFULL);
        assert_int_equal(dray_handle_pack(&h, packed, sizeof packed, NULL), DRAY_OK);
        assert_int_equal(dray_handle_unpack(packed, size, &back, NULL), DRAY_OK);
        assert_memory_equal(&h, &back, sizeof h);
    }
    dray_region_free(shared);
    dray_region_free(file);
    unlink(path);
}

TEST(truncated_handles_name_the_field)
{
    dray_region *r;
    assert_int_equal(dray_region_alloc(DRAY_REGION_SHARED, 4096, "s", &r, NULL), DRAY_OK);
    dray_handle h = described(r), back = DRAY_HANDLE_INIT, before = back;
    size_t size = dray_handle_packed_size();
    unsigned char *packed = malloc(size + 1);
    assert_int_equal(dray_handle_pack(&h, packed, size, NULL), DRAY_OK);
    const char *const names[] = {"magic",  "version",       "shape",        "stride",
                                 "device", "storage_bytes", "owner_member", "path"};
    bool seen[8] = {false};
    for (size_t n = 0; n < size; n++) {
        dray_error e;
        unsigned char *copy = malloc(n ? n : 1); /* so that reading past the end is found */
        memcpy(copy, packed, n);
        assert_int_equal(dray_handle_unpack(copy, n, &back, &e), DRAY_EFORMAT);
        free(copy);
        assert_non_null(strstr(e.message, "field"));
        for (int i = 0; i < 8; i++)
            seen[i] = seen[i] || strstr(e.message, names[i]);
    }
    for (int i = 0; i < 8; i++)
        assert_true(seen[i]);
    packed[size] = 0;
    assert_int_equal(dray_handle_unpack(packed, size + 1, &back, NULL), DRAY_EFORMAT);
    assert_memory_equal(&back, &before, sizeof back);
    free(packed);
    dray_region_free(r);
}

TEST(altered_handles_are_refused)
{
    dray_region *r;
    assert_int_equal(dray_region_alloc(DRAY_REGION_SHARED, 4096, "s", &r, NULL), DRAY_OK);
    dray_handle h = described(r), back = DRAY_HANDLE_INIT, before = back;
    size_t size = dray_handle_packed_size();
    unsigned char packed[1024];
    assert_int_equal(dray_handle_pack(&h, packed, sizeof packed, NULL), DRAY_OK);
    for (size_t bit = 0; bit < size * 8; bit++) {
        dray_error e;
        packed[bit / 8] ^= (unsigned char)(1u << bit % 8);
        int rc = dray_handle_unpack(packed, size, &back, &e);
        assert_int_equal(rc, bit / 8 >= 4 && bit / 8 < 8 ? DRAY_EVERSION : DRAY_EFORMAT);
        assert_non_null(strstr(e.message, "field"));
        packed[bit / 8] ^= (unsigned char)(1u << bit % 8);
    }
    assert_memory_equal(&back, &before, sizeof back);
    assert_int_equal(dray_handle_unpack(packed, size, &back, NULL), DRAY_OK);
    dray_region_free(r);
}

/* Forged: whoever packs it could also make the checksum right, so the fields must be checked. */
static void expect_forged(const dray_handle *h, const char *field)
{
    unsigned char packed[1024];
    dray_error e;
    dray_region *r = NULL;
    assert_int_equal(dray_handle_pack(h, packed, sizeof packed, &e), DRAY_EFORMAT);
    if (!strstr(e.message, field))
        fail_msg("'%s' does not name %s", e.message, field);
    assert_int_equal(dray_region_import(h, -1, 0, &r, &e), DRAY_EFORMAT);
    assert_null(r);
}

TEST(forged_rectangles_are_refused)
{
    dray_region *r;
    assert_int_equal(dray_region_alloc(DRAY_REGION_SHARED, 64, "s", &r, NULL), DRAY_OK);
    const dray_handle good = described(r);
    unsigned char packed[1024];
    dray_handle h = good;
    h.offset = 14; /* 14 + 2*20 + 4*2 + 2 = 64: the last byte that is there */
    assert_int_equal(dray_handle_pack(&h, packed, sizeof packed, NULL), DRAY_OK);
    h.offset = 15, expect_forged(&h, "stride");
    h.offset = 65, expect_forged(&h, "offset");
    h.offset = UINT64_MAX, expect_forged(&h, "offset");
    h = good, h.stride[0] = INT64_MAX, expect_forged(&h, "stride");
    h = good, h.stride[1] = -2, expect_forged(&h, "stride[1]");
    h = good, h.shape[0] = INT64_MAX, h.stride[0] = 2, expect_forged(&h, "stride");
    h = good, h.shape[0] = INT64_MAX, h.stride[0] = INT64_MAX, expect_forged(&h, "overflows");
    h = good, h.shape[1] = -1, expect_forged(&h, "shape[1]");
    h = good, h.shape[3] = 1, expect_forged(&h, "shape[3]");
    h = good, h.ndim = 5, expect_forged(&h, "ndim");
    h = good, h.dtype = 77, expect_forged(&h, "dtype");
    h = good, h.dtype = -1, expect_forged(&h, "dtype");
    h = good, h.kind = DRAY_REGION_HOST, expect_forged(&h, "kind");
    h = good, h.kind = 77, expect_forged(&h, "kind");
    h = good, h.kind = DRAY_REGION_FILE, expect_forged(&h, "path");
    h = good, h.kind = DRAY_REGION_CUDA, expect_forged(&h, "device");
    h = good, h.device[3] = 1, expect_forged(&h, "device");
    h = good, h.event[63] = 1, expect_forged(&h, "event");
    h = good, memset(h.path, 'x', sizeof h.path), expect_forged(&h, "path");
    h = good, memset(h.key, 0, sizeof h.key), expect_forged(&h, "key");
    h = good, h.kind = DRAY_REGION_FILE, memset(h.path, 'x', sizeof h.path), h.path[0] = '/';
    expect_forged(&h, "path"); /* without an end */
    h = good, h.kind = DRAY_REGION_CUDA, h.device[3] = 1, h.form = DRAY_CUDA_FORM_IPC;
    h.base_offset = 64, h.base_bytes = 128; /* the last of the allocation's bytes */
    assert_int_equal(dray_handle_pack(&h, packed, sizeof packed, NULL), DRAY_OK);
    h.base_offset = 65, expect_forged(&h, "base_offset");
    h.base_offset = 129, expect_forged(&h, "base_offset");
    h = good, h.shape[0] = 0, h.offset = 64; /* nothing at the very end */
    assert_int_equal(dray_handle_pack(&h, packed, sizeof packed, NULL), DRAY_OK);
    dray_region_free(r);
}

TEST(import_refuses_the_wrong_descriptor)
{
    dray_region *r, *other, *in = NULL;
    dray_error e;
    assert_int_equal(dray_region_alloc(DRAY_REGION_SHARED, 4096, "s", &r, NULL), DRAY_OK);
    assert_int_equal(dray_region_alloc(DRAY_REGION_SHARED, 4096, "o", &other, NULL), DRAY_OK);
    dray_handle h = described(r);
    assert_int_equal(dray_region_import(&h, -1, 0, &in, &e), DRAY_EINVALID);
    assert_int_equal(dray_region_import(&h, 9999, 0, &in, &e), DRAY_EINVALID);
    assert_int_equal(dray_region_import(&h, dray_region_fd(other), 0, &in, &e), DRAY_EINVALID);
    assert_non_null(strstr(e.message, "inode"));
    h.storage_bytes = 1 << 20; /* larger than what the owner has */
    assert_int_equal(dray_region_import(&h, dray_region_fd(r), 0, &in, &e), DRAY_EINVALID);
    assert_non_null(strstr(e.message, "storage_bytes"));

    int loose = memfd_create("loose", MFD_CLOEXEC | MFD_ALLOW_SEALING); /* could be shrunk later */
    assert_int_equal(ftruncate(loose, 4096), 0);
    struct stat st;
    assert_int_equal(fstat(loose, &st), 0);
    h = described(r);
    uint64_t key[2] = {st.st_dev, st.st_ino};
    memcpy(h.key, key, sizeof key);
    assert_int_equal(dray_region_import(&h, loose, 0, &in, &e), DRAY_EINVALID);
    assert_non_null(strstr(e.message, "sealed"));
    close(loose);
    assert_null(in);
    dray_region_free(r);
    dray_region_free(other);
}

static void send_descriptor(int socket, int fd, const void *data, size_t size)
{
    union {
        char bytes[CMSG_SPACE(sizeof(int))];
        struct cmsghdr align;
    } control = {{0}};
    struct iovec io = {.iov_base = (void *)(uintptr_t)data, .iov_len = size};
    struct msghdr m = {.msg_iov = &io,
                       .msg_iovlen = 1,
                       .msg_control = control.bytes,
                       .msg_controllen = sizeof control.bytes};
    struct cmsghdr *c = CMSG_FIRSTHDR(&m);
    c->cmsg_level = SOL_SOCKET, c->cmsg_type = SCM_RIGHTS, c->cmsg_len = CMSG_LEN(sizeof(int));
    memcpy(CMSG_DATA(c), &fd, sizeof fd);
    assert_int_equal(sendmsg(socket, &m, 0), (ssize_t)size);
}

static int receive_descriptor(int socket, void *data, size_t size)
{
    union {
        char bytes[CMSG_SPACE(sizeof(int))];
        struct cmsghdr align;
    } control = {{0}};
    struct iovec io = {.iov_base = data, .iov_len = size};
    struct msghdr m = {.msg_iov = &io,
                       .msg_iovlen = 1,
                       .msg_control = control.bytes,
                       .msg_controllen = sizeof control.bytes};
    int fd = -1;
    if (recvmsg(socket, &m, MSG_CMSG_CLOEXEC) == (ssize_t)size && CMSG_FIRSTHDR(&m))
        memcpy(&fd, CMSG_DATA(CMSG_FIRSTHDR(&m)), sizeof fd);
    return fd;
}

static int exporter(int socket)
{
    dray_region *r;
    if (dray_region_alloc(DRAY_REGION_SHARED, 3u << 20, "trainer", &r, NULL))
        return 1;
    unsigned char *base = dray_region_base(r);
    for (uint64_t i = 0; i < dray_region_bytes(r); i++)
        base[i] = (unsigned char)(i * 31 >> 3);
    dray_handle h = described(r);
    unsigned char packed[1024], answer;
    if (dray_handle_pack(&h, packed, sizeof packed, NULL))
        return 2;
    send_descriptor(socket, dray_region_fd(r), packed, dray_handle_packed_size());
    if (read(socket, &answer, 1) != 1 || base[77] != 0x5A) /* what the importer wrote */
        return 3;
    dray_region_free(r);
    return 0;
}

TEST(another_process_reads_and_writes)
{
    int pair[2];
    assert_int_equal(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, pair), 0);
    pid_t child = fork();
    if (child == 0)
        _exit(exporter(pair[1]));
    close(pair[1]);
    unsigned char packed[1024];
    size_t size = dray_handle_packed_size();
    int fd = receive_descriptor(pair[0], packed, size);
    assert_true(fd >= 0);
    dray_handle h = DRAY_HANDLE_INIT;
    assert_int_equal(dray_handle_unpack(packed, size, &h, NULL), DRAY_OK);
    assert_int_equal(h.owner_member, 42);
    dray_region *read_only, *writable;
    assert_int_equal(dray_region_import(&h, fd, 0, &read_only, NULL), DRAY_OK);
    assert_int_equal(dray_region_import(&h, fd, 1, &writable, NULL), DRAY_OK);
    close(fd);
    const unsigned char *base = dray_region_base(read_only);
    for (uint64_t i = 0; i < dray_region_bytes(read_only); i++)
        if (base[i] != (unsigned char)(i * 31 >> 3))
            fail_msg("byte %llu differs", (unsigned long long)i);
    ((unsigned char *)dray_region_base(writable))[77] = 0x5A;
    assert_int_equal(write(pair[0], "x", 1), 1);
    int status;
    assert_int_equal(waitpid(child, &status, 0), child);
    assert_int_equal(status, 0);
    assert_int_equal(base[77], 0x5A); /* the owner is gone, the mapping is not */
    dray_region_free(read_only);
    dray_region_free(writable);
    close(pair[0]);
}

TEST(file_handles_find_their_file)
{
    char path[PATH_MAX], other[PATH_MAX];
    make_file(path, "ckpt", 1000);
    dray_region *r, *in = NULL;
    dray_error e;
    assert_int_equal(dray_region_open(path, 0, &r, NULL), DRAY_OK);
    dray_handle h = described(r);
    assert_int_equal(dray_region_import(&h, -1, 0, &in, NULL), DRAY_OK);
    assert_int_equal(dray_region_bytes(in), 1000);
    dray_region_free(in);
    in = NULL;
    assert_int_equal(truncate(path, 999), 0);
    assert_int_equal(dray_region_import(&h, -1, 0, &in, &e), DRAY_EINVALID);
    make_file(other, "new", 1000);
    assert_int_equal(rename(other, path), 0);
    assert_int_equal(dray_region_import(&h, -1, 0, &in, &e), DRAY_EINVALID);
    assert_non_null(strstr(e.message, "inode"));
    unlink(path);
    assert_int_equal(dray_region_import(&h, -1, 0, &in, &e), DRAY_ENOENT);
    assert_null(in);
    dray_region_free(r);
}

int main(void)
{
    setenv("DRAY_CUDA_LIBRARY", "", 1); /* GPU memory: test_cuda.c */
    return suite_run(make_folder, remove_folder);
}
