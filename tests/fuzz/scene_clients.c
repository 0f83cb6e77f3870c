/* What clients say to the servers of scene.h. */
#include "fuzz/scene.h"

#include "base/clock.h"
#include "control/channel.h"
#include "weights/registry/registry.h"
#include "weights/sums.h"

#include <dray/lease.h>
#include <dray/queue.h>
#include <dray/weights.h>
#include <string.h>
#include <sys/mman.h>

int64_t scene_patience_ns = 20 * DRAY__MILLISECOND;

/* Who is disturbed goes on with what is left to do. */
typedef struct talk {
    bool strict, good;
} talk;

static void said(talk *t, int rc, const char *call, const dray_error *error)
{
    t->good = t->good && !rc;
    if (rc && t->strict) {
        fprintf(stderr, "%s: %s: %s\n", call, dray_error_name(rc), error->message);
        abort();
    }
}

#define SAY(call)                                                                                  \
    do {                                                                                           \
        dray_error say_error = {0};                                                                \
        dray_error *error = &say_error;                                                            \
        int say_rc = (call);                                                                       \
        said(t, say_rc, #call, error);                                                             \
    } while (0)

/* Memory may run out, once. */
#define SURE(call) MUST((call) == 0 || (call) == 0)

static dray_context *come(talk *t, const char *address, const char *name, const char *role)
{
    dray_context *context = NULL;
    dray_options options = DRAY_OPTIONS_INIT;
    options.address = address;
    options.name = name;
    options.role = role;
    options.timeout_ns = t->strict ? 20 * DRAY__SECOND : scene_patience_ns;
    SAY(dray_open(&options, &context, error));
    return context;
}

/* ---- queues ---------------------------------------------------------------------------------- */

static const char *const prompts[] = {"prompts"};
static const char *const words[] = {"words", "rewards"};
static const dray_queue_task tasks[] = {
    {.name = "rollout", .needs = prompts, .needs_count = 1, .writes = words, .writes_count = 2},
    {.name = "actor", .needs = words, .needs_count = 2}};
static const char *const provisional[] = {"actor"};

static dray_queue *join(talk *t, dray_context *context, const char *name, int durability)
{
    dray_queue *queue = NULL;
    dray_queue_options options = DRAY_QUEUE_OPTIONS_INIT;
    options.tasks = tasks;
    options.task_count = 2;
    options.capacity_rows = 10000;
    options.capacity_bytes = 64 << 20;
    options.max_attempts = 1;
    options.on_loss = DRAY_ON_LOSS_REFILL;
    options.durability = durability;
    options.provisional = provisional;
    options.provisional_count = 1;
    if (context)
        SAY(dray_queue_open(context, name, &options, &queue, error));
    return queue;
}

static void insert(talk *t, dray_queue *queue, const char *partition, uint32_t rows,
                   uint64_t refill)
{
    const int32_t values[64] = {1, 2, 3};
    const dray_column_data column = {.name = "prompts", .dtype = DRAY_I32, .values = values};
    const dray_tag tag = {"difficulty", 0.5};
    dray_insert_options o = DRAY_INSERT_OPTIONS_INIT;
    o.partition = partition;
    o.rows = rows;
    o.group_size = refill ? 0 : 2;
    o.columns = &column;
    o.column_count = 1;
    o.tags = &tag;
    o.tag_count = refill ? 0 : 1;
    o.row_bytes = refill ? 0 : 256;
    o.timeout_ns = DRAY__SECOND / 10;
    o.refill = refill;
    SAY(dray_queue_insert(queue, &o, NULL, error));
}

static dray_batch *take(talk *t, dray_queue *queue, const char *task, uint32_t count)
{
    dray_batch *batch = NULL;
    dray_claim_options o = DRAY_CLAIM_OPTIONS_INIT;
    o.task = task;
    o.count = count;
    o.up_to = 1;
    o.max_hold_ns = 10 * DRAY__SECOND;
    o.timeout_ns = DRAY__SECOND / 10;
    SAY(dray_queue_claim(queue, &o, &batch, error));
    return batch;
}

static void set_outputs(talk *t, dray_batch *batch)
{
    uint64_t offsets[65] = {0};
    int32_t flat[256];
    float rewards[64] = {1};
    uint32_t rows = dray_batch_rows(batch) < 64 ? dray_batch_rows(batch) : 64;
    memset(flat, 7, sizeof flat);
    for (uint32_t i = 0; i < rows; i++)
        offsets[i + 1] = offsets[i] + i % 4;
    const dray_column_data text = {
        .name = "words", .dtype = DRAY_I32, .ndim = 1, .offsets = offsets, .values = flat};
    const dray_column_data reward = {.name = "rewards", .dtype = DRAY_F32, .values = rewards};
    SAY(dray_batch_set(batch, &text, error));
    SAY(dray_batch_set(batch, &reward, error));
    SAY(dray_batch_set_tag(batch, 0, "tokens", 12, error));
}

static void read_back(talk *t, dray_batch *batch)
{
    dray_column column;
    double tag;
    void *packed = NULL;
    size_t size = 0;
    SAY(dray_batch_column(batch, "words", &column, error));
    SAY(dray_batch_tag(batch, 0, "difficulty", &tag, error));
    SAY(dray_batch_export(batch, &packed, &size, error));
    SAY(dray_batch_hold(batch, 20 * DRAY__SECOND, error));
    dray_free(packed);
}

/* Two of the rows fail, and are filled in again; the others go all the way. */
static void roll_out(talk *t, dray_queue *queue)
{
    const uint32_t failed[] = {0, 2};
    dray_refill refill = DRAY_REFILL_INIT;
    dray_batch *batch = take(t, queue, "rollout", 4);
    if (batch)
        SAY(dray_batch_fail(batch, failed, 2, "too long", error));
    dray_batch_free(batch);
    for (int i = 0; i < 2; i++) {
        SAY(dray_queue_refill_wait(queue, DRAY__SECOND / 10, &refill, error));
        if (refill.id && i == 0)
            insert(t, queue, refill.partition, refill.rows, refill.id);
        else if (refill.id)
            SAY(dray_queue_refill_decline(queue, refill.id, error));
    }
    batch = take(t, queue, "rollout", 6);
    if (batch) {
        dray_batch *next = NULL;
        dray_claim_options o = DRAY_CLAIM_OPTIONS_INIT;
        o.task = "rollout";
        o.count = 64;
        o.up_to = 1;
        set_outputs(t, batch);
        SAY(dray_batch_commit_claim(batch, &o, 1, &(uint32_t){0}, &next, error));
        dray_batch_free(batch);
        batch = next;
    }
    if (batch) {
        set_outputs(t, batch);
        SAY(dray_batch_commit(batch, error));
    }
    dray_batch_free(batch);
}

static void train(talk *t, dray_queue *queue, uint32_t round)
{
    void *cursor = NULL;
    size_t size = 0;
    dray_claim_options o = DRAY_CLAIM_OPTIONS_INIT;
    dray_batch *batch = NULL, *rest = take(t, queue, "actor", 1);
    if (rest) {
        read_back(t, rest);
        SAY(dray_batch_commit(rest, error));
    }
    dray_batch_free(rest);
    SAY(dray_queue_cursor(queue, 1, &cursor, &size, error));
    o.task = "actor";
    o.count = 2;
    o.policy = DRAY_POLICY_LOCKSTEP;
    o.group = "trainers";
    o.round = round;
    o.token_cap = 1000;
    o.dp_size = 1;
    o.timeout_ns = DRAY__SECOND / 10;
    SAY(dray_queue_claim(queue, &o, &batch, error));
    if (batch)
        SAY(dray_batch_commit(batch, error));
    dray_batch_free(batch);
    if (cursor) {
        SAY(dray_queue_covered(queue, cursor, size, error));
        SAY(dray_queue_resume(queue, cursor, size, NULL, error));
    }
    dray_free(cursor);
}

static void work(talk *t, dray_queue *queue, dray_queue *other, uint32_t step)
{
    dray_admission admission = DRAY_ADMISSION_INIT;
    char *status = NULL, partition[32];
    snprintf(partition, sizeof partition, "step-%u", step);
    admission.batch_rows = 12;
    admission.staleness = 1;
    admission.concurrency = 16;
    if (!step)
        SAY(dray_queue_admit(queue, &admission, error));
    insert(t, queue, partition, 12, 0);
    SAY(dray_queue_seal(queue, partition, 12, error));
    roll_out(t, queue);
    if (!step)
        SAY(dray_queue_version(other, 2, error));
    train(t, other, step ? step - 1 : 0);
    SAY(dray_queue_status(queue, &status, error));
    dray_queue_wait(other, partition, "rollout", DRAY__MILLISECOND, NULL);
    SAY(dray_queue_clear(queue, partition, error));
    if (!step)
        SAY(dray_queue_end(queue, error));
    dray_free(status);
}

bool scene_queue(const char *address, const char *name, int durability, uint32_t step, bool strict)
{
    talk state = {strict, true}, *t = &state;
    dray_context *task = come(t, address, "task 0", "task");
    dray_context *trainer = come(t, address, "trainer 0", "trainer");
    dray_queue *queue = join(t, task, name, durability);
    dray_queue *other = join(t, trainer, name, durability);
    if (queue && other)
        work(t, queue, other, step);
    dray_queue_close(other);
    dray_queue_close(queue);
    dray_close(trainer);
    dray_close(task);
    return t->good;
}

/* ---- weights --------------------------------------------------------------------------------- */

static dray_layout *make_layout(dray_region_kind kind)
{
    const int64_t shape[2] = {16, 8};
    const dray_region_info info = {.kind = (int32_t)kind, .bytes = 512, .name = "w"};
    const dray_block block = {.extent = {16, 8}, .stride = {32, 4}};
    dray_layout *layout;
    SURE(dray_layout_new(&layout, NULL));
    SURE(dray_layout_add_region(layout, &info, NULL, NULL));
    SURE(dray_layout_add_tensor(layout, "weight", DRAY_F32, 2, shape, NULL, NULL));
    SURE(dray_layout_add_block(layout, &block, NULL));
    return layout;
}

static void update(talk *t, dray_subscriber *subscriber, dray_publisher *publisher)
{
    dray_update_options o = DRAY_UPDATE_OPTIONS_INIT;
    uint64_t version, incarnation;
    o.timeout_ns = t->strict ? 10 * DRAY__SECOND : scene_patience_ns;
    SAY(dray_publisher_publish(publisher, 1, NULL, error));
    SAY(dray_update_weights(subscriber, &o, NULL, error));
    SAY(dray_subscriber_version(subscriber, &version, &incarnation, NULL, error));
    SAY(dray_publisher_wait(publisher, 1, o.timeout_ns, NULL, error));
    SAY(dray_publisher_publish(publisher, 2, NULL, error));
    SAY(dray_prefetch_weights(subscriber, &o, NULL, error));
    SAY(dray_commit_weights(subscriber, &o, NULL, error));
    SAY(dray_subscriber_verify(subscriber, error));
    SAY(dray_subscriber_release_mappings(subscriber, error));
    SAY(dray_publisher_release(publisher, o.timeout_ns, NULL, 0, &(uint32_t){0}, error));
    SAY(dray_subscriber_leave(subscriber, o.timeout_ns, NULL, error));
}

static void look(talk *t, dray_context *tool, const char *name)
{
    dray_checksums *sums = NULL;
    dray_engines *engines = NULL;
    char *status = NULL;
    SAY(dray_checksums_fetch(tool, name, NULL, &sums, error));
    SAY(dray_context_status(tool, &status, error));
    SAY(dray_report_post(tool, "step", "{\"loss\": 1.5}", error));
    SAY(dray_barrier(tool, "start", 1, DRAY__SECOND, error));
    SAY(dray_engines_open(tool, &engines, error));
    dray_engines_close(engines);
    dray_checksums_free(sums);
    dray_free(status);
}

bool scene_weights(const char *address, const char *name, bool strict)
{
    talk state = {strict, true}, *t = &state;
    dray_context *trainer = come(t, address, "trainer", "trainer");
    dray_context *engine = come(t, address, "engine", "engine");
    dray_layout *layout = make_layout(DRAY_REGION_SHARED);
    dray_region *from = NULL, *to = NULL;
    dray_publisher *publisher = NULL;
    dray_subscriber *subscriber = NULL;
    dray_publisher_options out = DRAY_PUBLISHER_OPTIONS_INIT;
    dray_subscriber_options in = DRAY_SUBSCRIBER_OPTIONS_INIT;
    SURE(dray_regions_for_layout(layout, 1, &from, NULL));
    SURE(dray_regions_for_layout(layout, 1, &to, NULL));
    memset(dray_region_base(from), 0x3f, 512);
    out.regions = &from;
    in.regions = &to;
    in.group = "group";
    if (trainer)
        SAY(dray_publisher_open(trainer, name, layout, &out, &publisher, error));
    if (engine)
        SAY(dray_subscriber_open(engine, name, layout, &in, &subscriber, error));
    if (publisher && subscriber) {
        update(t, subscriber, publisher);
        look(t, trainer, name);
    }
    dray_subscriber_close(subscriber);
    dray_publisher_close(publisher);
    dray_close(engine);
    dray_close(trainer);
    dray_region_free(from);
    dray_region_free(to);
    dray_layout_free(layout);
    return t->good;
}

/* ---- messages that nobody sends to himself --------------------------------------------------- */

typedef struct hand {
    talk *t;
    dray__channel *channel;
    dray__writer w;
    dray__reply reply;
} hand;

static uint64_t ask(hand *h, uint16_t type, int fd)
{
    talk *t = h->t;
    h->reply = (dray__reply){0};
    SAY(dray__call(h->channel, type, &h->w, &fd, fd >= 0, dray__deadline(DRAY__SECOND), &h->reply,
                   error));
    dray__close_fds(h->reply.fds, h->reply.fd_count);
    dray__reader r = h->reply.payload;
    dray__writer_reset(&h->w);
    return dray__get_u64(&r);
}

static void put_layout(dray__writer *w, dray_region_kind kind)
{
    dray_layout *layout = make_layout(kind);
    void *data;
    size_t size;
    SURE(dray_layout_pack(layout, &data, &size, NULL));
    dray__put_blob(w, data, size);
    free(data);
    dray_layout_free(layout);
}

/* regions: how many are to be put. */
static uint64_t open_publisher(hand *h, const char *name, uint32_t regions)
{
    dray__put_string(&h->w, name);
    dray__put_u32(&h->w, 0);
    dray__put_u32(&h->w, 1);
    dray__put_u64(&h->w, 4711);
    dray__put_string(&h->w, "tcp:127.0.0.1:9");
    dray__put_u32(&h->w, 1);
    dray__put_u32(&h->w, regions);
    dray__put_u64(&h->w, 0);
    put_layout(&h->w, DRAY_REGION_SHARED);
    return ask(h, DRAY__MSG_PUBLISHER_OPEN, -1);
}

static uint64_t open_subscriber(hand *h, const char *name)
{
    dray__put_string(&h->w, name);
    dray__put_string(&h->w, "by hand");
    dray__put_u32(&h->w, 0);
    dray__put_u32(&h->w, 1);
    dray__put_u64(&h->w, 4712);
    dray__put_string(&h->w, "");
    dray__put_u32(&h->w, 0);
    dray__put_u32(&h->w, 0);
    put_layout(&h->w, DRAY_REGION_HOST);
    return ask(h, DRAY__MSG_SUBSCRIBER_OPEN, -1);
}

static void put_region(hand *h, uint64_t key)
{
    uint8_t packed[1024];
    dray_handle handle = DRAY_HANDLE_INIT;
    dray_region *region;
    SURE(dray_region_alloc(DRAY_REGION_SHARED, 512, "w", &region, NULL));
    SURE(dray_handle_describe(region, &handle, NULL));
    SURE(dray_handle_pack(&handle, packed, sizeof packed, NULL));
    dray__put_u64(&h->w, key);
    dray__put_u32(&h->w, 0);
    dray__put_blob(&h->w, packed, dray_handle_packed_size());
    ask(h, DRAY__MSG_REGION_PUT, dray_region_fd(region));
    dray_region_free(region);
}

static void publish(hand *h, uint64_t key)
{
    dray__sums sums = {0};
    SURE(!dray__sums_add(&sums, "weight", DRAY_F32, 128, 7));
    dray__put_u64(&h->w, key);
    dray__put_u64(&h->w, 3);
    dray__put_u8(&h->w, 1);
    dray__sums_put(&h->w, &sums);
    ask(h, DRAY__MSG_PUBLISH, -1);
    dray__sums_free(&sums);
}

static uint64_t begin(hand *h, uint64_t key, uint64_t *set)
{
    dray__put_u64(&h->w, key);
    dray__put_u8(&h->w, DRAY_MODE_TENSOR);
    dray__put_u64(&h->w, 0);
    dray__put_string(&h->w, "");
    dray__put_u64(&h->w, 0);
    dray__put_u8(&h->w, 1);
    dray__put_i64(&h->w, DRAY__SECOND / 10);
    dray__put_u8(&h->w, DRAY__UPDATE);
    dray__put_u8(&h->w, 0);
    dray__put_u64(&h->w, 0);
    dray__put_u64(&h->w, 0);
    uint64_t attempt = ask(h, DRAY__MSG_UPDATE_BEGIN, -1);
    dray__reader r = h->reply.payload;
    dray__get_bytes(&r, 8 + 1 + 8 + 8 + 1);
    *set = dray__get_u64(&r);
    return attempt;
}

static void vote(hand *h, uint64_t key, uint64_t attempt)
{
    dray__sums sums = {0}, none = {0};
    SURE(!dray__sums_add(&sums, "weight", DRAY_F32, 128, 7));
    dray__put_u64(&h->w, key);
    dray__put_u64(&h->w, attempt);
    dray__put_u32(&h->w, 0);
    dray__put_string(&h->w, "");
    dray__put_i64(&h->w, DRAY__SECOND / 10);
    dray__sums_put(&h->w, &sums);
    dray__sums_put(&h->w, &none);
    dray__put_u8(&h->w, DRAY__HELD_AS_READ);
    dray__sums_put(&h->w, &none);
    ask(h, DRAY__MSG_UPDATE_VOTE, -1);
    dray__sums_free(&sums);
}

static void ask_about(hand *h, uint16_t type, uint64_t key)
{
    dray__put_u64(&h->w, key);
    ask(h, type, -1);
}

static void read_set(hand *h, uint64_t key, uint64_t set)
{
    dray__put_u64(&h->w, key);
    dray__put_u8(&h->w, DRAY__SOURCES_MEMBERS);
    dray__put_i64(&h->w, DRAY__SECOND / 10);
    dray__put_u64(&h->w, set);
    dray__put_u32(&h->w, 0);
    ask(h, DRAY__MSG_UPDATE_SOURCES, -1);
    dray__put_u64(&h->w, key);
    dray__put_u64(&h->w, set);
    dray__put_u32(&h->w, 0);
    dray__put_u32(&h->w, 0);
    ask(h, DRAY__MSG_REGION_GET, -1);
}

static void move_and_release(hand *h, uint64_t from, uint64_t to, uint64_t set)
{
    dray__put_u64(&h->w, to);
    dray__put_string(&h->w, "{\"state\": \"fine\"}");
    ask(h, DRAY__MSG_UPDATE_REPORT, -1);
    dray__put_u64(&h->w, from);
    dray__put_i64(&h->w, DRAY__MILLISECOND);
    ask(h, DRAY__MSG_REGIONS_RELEASE, -1);
    ask_about(h, DRAY__MSG_REGIONS_REVOKED, to);
    dray__put_u64(&h->w, to);
    dray__put_u64(&h->w, set);
    ask(h, DRAY__MSG_REGIONS_DROP, -1);
    dray__put_u64(&h->w, from);
    dray__put_u64(&h->w, 4713);
    dray__put_u32(&h->w, 1);
    dray__put_u32(&h->w, 0);
    dray__put_blob(&h->w, NULL, 0);
    ask(h, DRAY__MSG_REGIONS_MOVE, -1);
}

static void find_keepers(hand *h)
{
    dray__put_string(&h->w, "/nowhere/keeper");
    dray__put_string(&h->w, "tcp:127.0.0.1:9");
    dray__put_u8(&h->w, 0);
    ask(h, DRAY__MSG_QUEUE_KEEPER_JOIN, -1);
    dray__reader r = h->reply.payload;
    uint32_t number = dray__get_u32(&r);
    dray__put_u32(&h->w, number);
    ask(h, DRAY__MSG_QUEUE_KEEPER_FIND, -1);
    dray__put_u32(&h->w, number);
    dray__put_u64(&h->w, 0);
    dray__put_i64(&h->w, DRAY__MILLISECOND);
    h->t->strict = false; /* nothing comes */
    ask(h, DRAY__MSG_QUEUE_KEEPER_WAIT, -1);
}

bool scene_by_hand(const char *address, const char *name, bool strict)
{
    talk state = {strict, true}, *t = &state;
    hand h = {.t = t};
    uint64_t set = 0;
    dray_context *context = come(t, address, "hand", "engine");
    if (context)
        SAY(dray__channel_open(context, &h.channel, error));
    if (h.channel) {
        uint64_t from = open_publisher(&h, name, 1), to = open_subscriber(&h, name);
        put_region(&h, from);
        publish(&h, from);
        uint64_t attempt = begin(&h, to, &set);
        read_set(&h, to, set);
        dray__put_u64(&h.w, to);
        dray__put_u64(&h.w, attempt);
        dray__put_i64(&h.w, DRAY__MILLISECOND);
        ask(&h, DRAY__MSG_UPDATE_WRITING, -1);
        vote(&h, to, attempt);
        ask_about(&h, DRAY__MSG_GROUP_STATE, to);
        ask_about(&h, DRAY__MSG_PREFETCH_DROP, to);
        move_and_release(&h, from, to, set);
        dray__put_u64(&h.w, to);
        ask(&h, DRAY__MSG_WEIGHTS_CLOSE, -1);
        dray__put_bytes(&h.w, "echo", 4);
        ask(&h, DRAY__MSG_PING, -1);
        find_keepers(&h);
    }
    dray__channel_close(h.channel);
    dray__writer_free(&h.w);
    dray_close(context);
    return t->good;
}

/* ---- leases ---------------------------------------------------------------------------------- */

/* Two take turns; the second one, too, where the first was silent. */
bool scene_leases(const char *address, const char *name, bool strict)
{
    talk all = {.strict = strict, .good = true}, *t = &all;
    dray_lease *held = NULL, *next = NULL;
    const char *names[] = {"engine+trainer/cuda:0", name};
    dray_lease_options options = DRAY_LEASE_OPTIONS_INIT;
    options.term_ns = DRAY__MILLISECOND;
    dray_context *a = come(t, address, "first", "trainer");
    dray_context *b = come(t, address, "second", "engine");
    if (a)
        SAY(dray_lease_acquire(a, names, 2, &options, &held, error));
    if (held)
        SAY(dray_lease_check(held, NULL, error));
    if (b)
        SAY(dray_lease_acquire(b, names, 1, NULL, &next, error));
    dray_lease_release(held, NULL);
    if (next)
        SAY(dray_lease_release(next, error));
    dray_close(b);
    dray_close(a);
    return all.good;
}
