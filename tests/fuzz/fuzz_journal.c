/* What a coordinator finds in its folder when it begins. The first byte says which: 0 a journal as
 * it is; 1 the records of one, of each u8 kind, u32 owner, u32 bytes, body: their headers and sums
 * are made for them; 2 the list of spaces in stores.
 *
 * A coordinator that takes a journal goes on with it, says how its queue is, and whoever comes
 * after it can read what it left. */
#include "fuzz/scene.h"

#include "base/json.h"
#include "control/coordinator.h"
#include "queue/journal/record.h"
#include "queue/server/controller.h"
#include "queue/storage/stores.h"

#include <dirent.h>
#include <event2/event.h>
#include <fcntl.h>
#include <sys/stat.h>

const int fuzz_rounds = 150;

static struct world {
    struct event_base *base;
    char folder[96], journal[128], stores[128], socket[96];
} w;

static void make(void)
{
    w.base = event_base_new();
    MUST(w.base);
    snprintf(w.folder, sizeof w.folder, "%s", fuzz_path("journals"));
    snprintf(w.socket, sizeof w.socket, "%s", fuzz_path("socket"));
    snprintf(w.journal, sizeof w.journal, "%s/queue-0123456789abcdef.journal", w.folder);
    snprintf(w.stores, sizeof w.stores, "%s/stores", w.folder);
    MUST(mkdir(w.folder, 0700) == 0);
}

/* false: it was refused. */
static bool serve(dray_error *error)
{
    const char *keeper = scene_keeper();
    dray__coordinator *coordinator;
    const dray__coordinator_options options = {.unix_path = w.socket, .keeper_path = keeper};
    MUST(dray__coordinator_new(w.base, &options, &coordinator, NULL) == 0);
    bool taken = dray__queue_add(coordinator, w.base, keeper, w.folder, NULL, error) == DRAY_OK;
    for (int i = 0; i < 3 && taken; i++)
        event_base_loop(w.base, EVLOOP_NONBLOCK);
    json_t *status = dray__coordinator_status(coordinator);
    char *text = json_dumps(status, JSON_COMPACT);
    MUST(text);
    free(text);
    json_decref(status);
    dray__coordinator_free(coordinator);
    return taken;
}

/* A journal of these records, as they would have been written. */
static void compose(dray__reader *r)
{
    static const dray__journal_options options;
    dray__output out;
    uint64_t salt;
    int fd = open(w.journal, O_RDWR | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);
    MUST(fd >= 0);
    MUST(dray__head_write(&dray__journal_real_files, fd, w.journal, &salt, NULL) == 0);
    MUST(dray__output_init(&out, &dray__journal_real_files, NULL) == 0);
    dray__output_to(&out, fd, w.journal, salt, DRAY__FILE_HEAD);
    for (uint64_t seq = 1; r->at < r->size && !r->failed; seq++) {
        dray__journal_entry entry = {.kind = dray__get_u8(r), .seq = seq};
        entry.owner = dray__get_u32(r);
        size_t size = dray__get_u32(r);
        size = size < r->size - r->at ? size : r->size - r->at;
        if (!r->failed)
            dray__put_bytes(&entry.body, dray__get_bytes(r, size), size);
        MUST(dray__output_entry(&out, &entry, seq - 1, &options, NULL) == 0);
        dray__writer_free(&entry.body);
    }
    MUST(dray__output_flush(&out, NULL) == 0);
    dray__output_free(&out);
    close(fd);
}

static bool is_used(void *user, uint64_t space)
{
    (void)user;
    return space & 1;
}

/* No store is reached. */
static bool is_listed(void *user, const char *kind, const char *address)
{
    (void)user;
    MUST(kind && address);
    return false;
}

static void clean(void)
{
    const dray__stores_options options = {.folder = w.folder};
    dray__stores *stores;
    MUST(dray__stores_new(&options, &stores, NULL) == 0);
    dray__stores_clean(stores, is_used, is_listed, NULL, NULL);
    dray__stores_note(stores, "redis", "unix:/nowhere", 7, NULL);
    dray__stores_free(stores);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    dray_error error;
    dray__reader r = dray__reader_of(data, size);
    int kind = dray__get_u8(&r) % 3;
    if (!w.base)
        make();
    if (kind == 1)
        compose(&r);
    else if (size)
        fuzz_write(kind ? w.stores : w.journal, data + 1, size - 1);
    if (kind == 2)
        clean();
    else if (serve(&error) && !serve(&error)) {
        fprintf(stderr, "it was taken once, but then: %s\n", error.message);
        abort();
    }
    unlink(w.journal);
    unlink(w.stores);
    return 0;
}

/* ---- what it begins with --------------------------------------------------------------------- */

static void pass(void *user, scene_link *link, bool answer, const dray__frame *frame,
                 const int *fds)
{
    (void)user;
    scene_send(link, answer, frame, fds);
}

static int put_record(void *user, const dray__journal_record *record, dray_error *error)
{
    (void)error;
    dray__put_u8(user, (uint8_t)record->kind);
    dray__put_u32(user, record->owner);
    dray__put_blob(user, record->body, record->size);
    return DRAY_OK;
}

static void put_file(fuzz_put put, void *user, const char *path)
{
    static uint8_t data[1 + (1 << 18)];
    FILE *file = fopen(path, "rb");
    MUST(file);
    size_t size = fread(data + 1, 1, sizeof data - 1, file);
    fclose(file);
    while (size && !data[size]) /* zeros were written ahead */
        size--;
    put(user, data, size + 1);
}

void fuzz_seeds(fuzz_put put, void *user)
{
    char folder[96], path[400];
    uint64_t end, last;
    dray__writer records = {0};
    snprintf(folder, sizeof folder, "%s", fuzz_path("recorded"));
    scene *s = scene_start(folder, pass, NULL);
    scene_queue(scene_address(s), "queue", 3, 0, true);
    scene_stop(s);
    DIR *dir = opendir(folder);
    for (const struct dirent *entry; dir && (entry = readdir(dir));) {
        snprintf(path, sizeof path, "%s/%s", folder, entry->d_name);
        if (!strstr(path, ".journal"))
            continue;
        put_file(put, user, path);
        MUST(dray__journal_read(path, put_record, &records, &end, &last, NULL) == 0);
    }
    closedir(dir);
    fuzz_put_kind(put, user, 1, &records);
    dray__writer_free(&records);
    fuzz_put_text(put, user, 2,
                  "\nredis 0123456789abcdef unix:/nowhere/redis\n\nother 7 x\n\nredis 12");
}
