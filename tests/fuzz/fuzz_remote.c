/* What data servers, or those in their place, answer to an update that reads weights over them
 * (weights/sources/remote.h). The update here reads one publisher, and, if the input says so, takes
 * parts of it from two other members of its cohort: one on another host, and one of this host,
 * whose memory it maps.
 *
 * The first byte names the scene (the bits of enum scene). Then follow acts, one for each request:
 * a kind (enum act) and its arguments (`act` reads them). A request without an act is answered as
 * it should be.
 *
 * Whatever is answered: the update ends before its deadline, nothing outside its blocks is written,
 * it holds no more than it may, and where it is verified and agrees with the announced sums, it
 * holds what was published. The next updates over the same connections succeed.
 *
 * Server and reader take turns in one thread, and the clock goes forward when neither has anything
 * to do, so that no input waits. */
#include "fuzz/fuzz.h"

#include "base/clock.h"
#include "net/peer.h"
#include "weights/delta/delta.h"
#include "weights/server/arena.h"
#include "weights/server/shares.h"
#include "weights/transfer/transfer.h"

#include <fcntl.h>
#include <signal.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <time.h>

const int fuzz_rounds = 4;

enum scene { BASE = 1, COHORT = 2, MAPPED = 4, STAGED = 8, SMALL = 16, UNVERIFIED = 32 };
enum act { HONEST, CHANGED, TAMPERED, LIED, RAW, REFUSED, CLOSED, SILENT, TWICE, CUT, LATE, ACTS };
enum {
    ROWS = 320,
    KEPT = 65536, /* where the tensors begin, in the publisher's memory and in the engine's */
    KEPT_STRIDE = ROWS * 2 + 16,
    WIDENED = KEPT + ROWS * KEPT_STRIDE + 64,
    NARROWED = WIDENED + 8192,
    QUANTISED = NARROWED + 1024,
    SCALES = QUANTISED + 8192,
    BYTES = SCALES + 1024,
    ATTEMPT = 2,
    RUN = 9,
    LINKS = 32
};
#define UPDATE_NS (10 * DRAY__SECOND)

/* ---- the clock ------------------------------------------------------------------------------- */

static int64_t forward_ns;

/* The library's clock; sanitizers call it before they are ready. */
__attribute__((no_sanitize("thread", "address"))) int clock_gettime(clockid_t clock,
                                                                    struct timespec *t)
{
    int rc = (int)syscall(SYS_clock_gettime, clock, t);
    int64_t ns = t->tv_nsec + (clock == CLOCK_MONOTONIC ? forward_ns : 0);
    t->tv_sec += ns / DRAY__SECOND;
    t->tv_nsec = ns % DRAY__SECOND;
    return rc;
}

/* ---- the world ------------------------------------------------------------------------------- */

/* Weights that a data server speaks of: those of the publisher, or of a member of the cohort. */
typedef struct holding {
    uint64_t token;
    dray_region *region;
} holding;

static struct world {
    dray_layout *published, *held, *shared; /* shared: as held, in memory that can be mapped */
    holding publisher, wrong_publisher, member, wrong_member, engine;
    dray__delta *delta;
    dray__delta_view *view;
    dray_region *staging;
    dray__staging *arena;
    dray_region *slots[DRAY__ARENA_HELD];
    uint64_t slot_at[DRAY__ARENA_HELD];
    uint32_t next_slot;
    dray__packer *packer;
    pid_t other; /* the member's process of this host, as the reader sees it */
    int listener;
    char endpoint[DRAY__STREAM_ADDRESS];
    dray__sources *sources;
    dray__destination destination;
    uint8_t before[BYTES], expected[BYTES]; /* the engine's memory */
    bool inside[BYTES];                     /* of a block of it */
    dray__sums sums;                        /* what is announced */
    bool ready;
} w;

static uint8_t *memory_of(const holding *h)
{
    return dray_region_base(h->region);
}

static void add_tensor(dray_layout *l, const char *name, dray_dtype dtype, int64_t rows,
                       int64_t columns)
{
    const int64_t shape[2] = {rows, columns};
    MUST(dray_layout_add_tensor(l, name, dtype, 2, shape, NULL, NULL) == 0);
}

static void add_block(dray_layout *l, uint32_t tensor, int64_t row, int64_t rows, uint64_t at,
                      int64_t stride)
{
    const dray_tensor_info *of = dray_layout_tensor(l, tensor);
    int64_t element = (int64_t)dray_dtype_size((dray_dtype)of->dtype);
    dray_block block = {.tensor = tensor,
                        .offset = at + (uint64_t)(row * stride),
                        .start = {row, 0},
                        .extent = {rows, of->shape[1]},
                        .stride = {stride, element}};
    MUST(dray_layout_add_block(l, &block, NULL) == 0);
}

static dray_layout *make_layout(bool engine, dray_region_kind kind)
{
    dray_region_info info = {.kind = kind, .bytes = BYTES, .name = "weights"};
    dray_layout *l;
    MUST(dray_layout_new(&l, NULL) == 0 && dray_layout_add_region(l, &info, NULL, NULL) == 0);
    add_tensor(l, "kept", DRAY_BF16, ROWS, ROWS);
    add_tensor(l, "widened", engine ? DRAY_F32 : DRAY_BF16, 40, 24);
    add_tensor(l, "narrowed", engine ? DRAY_BF16 : DRAY_F32, 12, 16);
    add_tensor(l, "quantised", engine ? DRAY_F8E4M3 : DRAY_BF16, 32, 64);
    for (int64_t row = 0; row < ROWS; row += engine ? ROWS : ROWS / 2)
        add_block(l, 0, row, engine ? ROWS : ROWS / 2, KEPT, KEPT_STRIDE);
    add_block(l, 1, 0, 40, WIDENED, engine ? 100 : 50);
    add_block(l, 2, 0, 12, NARROWED, 70 / (engine ? 2 : 1) / 4 * 4);
    add_block(l, 3, 0, 32, QUANTISED, engine ? 72 : 136);
    if (engine) {
        const dray_quant quant = {.kind = DRAY_QUANT_BLOCK, .scales = 4, .block = {8, 8}};
        add_tensor(l, "scales", DRAY_F32, 4, 8);
        add_block(l, 4, 0, 4, SCALES, 40);
        MUST(dray_layout_set_quant(l, 3, &quant, NULL) == 0);
    }
    return l;
}

/* Small floats everywhere: 0x3C to 0x3F begins one, in either dtype. */
static void fill(uint8_t *memory, uint8_t salt)
{
    for (size_t i = 0; i < BYTES; i++)
        memory[i] = (uint8_t)(i % 2 ? 0x3C + (i / 2 + salt) % 3 : (i * 7 + salt) % 128);
}

/* region NULL: a new one. */
static void hold(holding *h, const dray_layout *layout, dray_region_kind kind,
                 const struct dray__delta_view *view, dray_region *region)
{
    *h = (holding){.token = dray__local_token(), .region = region};
    if (!region)
        MUST(dray_region_alloc(kind, BYTES, "weights", &h->region, NULL) == 0);
    MUST(dray__local_add(h->token, layout, &h->region, 1, view, w.arena, NULL) == 0);
}

/* The publisher's, with the delta from version 1 to version 2; `before` is what a rank of version 1
 * holds of what is not converted. */
static void publish(void)
{
    dray_region *region;
    uint8_t *memory;
    MUST(dray_region_alloc(DRAY_REGION_HOST, BYTES, "weights", &region, NULL) == 0);
    memory = dray_region_base(region);
    fill(memory, 1);
    MUST(dray__delta_new(w.published, &region, 0, &w.delta, NULL) == 0);
    MUST(dray__delta_publish(w.delta, 1, 1, INT64_MAX, NULL) == 0);
    memset(w.before, 0xEE, BYTES);
    for (int row = 0; row < ROWS; row++)
        memcpy(w.before + KEPT + row * KEPT_STRIDE, memory + KEPT + row * KEPT_STRIDE, ROWS * 2);
    for (int i = 0; i < 900; i++)
        memory[KEPT + i * 61] ^= 5;
    MUST(dray__delta_publish(w.delta, 1, 2, INT64_MAX, NULL) == 0);
    MUST(dray__delta_open(w.published, dray__delta_region(w.delta), &w.view, NULL) == 0);
    hold(&w.publisher, w.published, DRAY_REGION_HOST, w.view, region);
    hold(&w.wrong_publisher, w.published, DRAY_REGION_HOST, NULL, NULL);
    memcpy(memory_of(&w.wrong_publisher), memory, BYTES);
    for (size_t i = KEPT; i < BYTES; i += 211)
        memory_of(&w.wrong_publisher)[i] ^= 3;
}

/* What a member of the cohort has, with the publisher's sums; nothing of what was quantised. */
static void share(const holding *h, bool wrong)
{
    dray__shares *shares;
    dray_region *regions[1] = {h->region}, *from[1] = {w.publisher.region};
    memcpy(memory_of(h), w.expected, BYTES);
    for (size_t i = KEPT; wrong && i < BYTES; i += 211)
        memory_of(h)[i] ^= 3;
    MUST(dray__shares_new(RUN, w.shared, &h->region, &shares, NULL) == 0);
    for (uint32_t b = 0; b < 3; b++) {
        dray__rect whole = dray__rect_of(w.shared, b);
        uint64_t sum, source_sum = 0, part;
        MUST(dray__sum_rect(w.shared, regions, b, &whole, NULL, &sum, NULL) == 0);
        for (uint32_t p = b ? b + 1 : 0; p < b + 2; p++) {
            dray__rect rect = dray__rect_of(w.published, p);
            MUST(dray__sum_rect(w.published, from, p, &rect, NULL, &part, NULL) == 0);
            source_sum += part;
        }
        MUST(dray__shares_expect(shares, b, &whole));
        if (b > 0)
            MUST(dray__shares_enter(shares, b, &whole, source_sum, sum));
        for (int64_t row = 0; b == 0 && row < ROWS; row++) { /* so that any stripe of it is whole */
            dray__rect one = {.start = {row}, .extent = {1, ROWS, 1, 1}};
            MUST(dray__sum_rect(w.shared, regions, b, &one, NULL, &sum, NULL) == 0);
            MUST(dray__shares_enter(shares, b, &one, sum, sum));
        }
    }
    dray__local_share(h->token, shares);
    dray__local_began(h->token, RUN);
}

static void describe(dray__source *s, const char *name, uint64_t host, uint64_t token,
                     const dray_layout *layout)
{
    s->member = token;
    s->host = host;
    s->token = token;
    s->pid = w.other;
    s->name = strdup(name);
    s->endpoint = strdup(w.endpoint);
    MUST(s->name && s->endpoint && dray__layout_copy(layout, NULL, &s->layout, NULL, NULL) == 0);
}

static void make_sources(void)
{
    w.destination = (dray__destination){
        .layout = w.held, .regions = &w.engine.region, .token = w.engine.token, .world = 1};
    w.destination.host = 1;
    w.destination.member = w.engine.token;
    MUST(dray__sources_live(1, 1, 2, &w.destination, &w.sources, NULL) == 0);
    describe(&w.sources->sources[0], "trainer", 2, w.publisher.token, w.published);
    w.sources->count = 1;
    MUST(dray__sources_prepare(w.sources, &w.destination, NULL) == 0);
    MUST(dray__sources_cohort(w.sources, 3, 3, NULL) == 0);
    describe(&w.sources->cohort[0], "engine", 1, w.engine.token, w.held);
    describe(&w.sources->cohort[1], "far", 3, w.member.token, w.shared);
    describe(&w.sources->cohort[2], "near", 1, w.member.token, w.shared);
}

/* It has the descriptors that are open now. */
static pid_t make_other(void)
{
    pid_t child = fork();
    MUST(child >= 0);
    if (child)
        return child;
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    for (;;)
        pause();
}

/* ---- the servers ----------------------------------------------------------------------------- */

static struct link {
    bool open, silent, ending;
    int fd;
    uint8_t in[DRAY__REQUEST_HEADER + DRAY__REQUEST_MAX];
    size_t have, out_at;
    dray__writer out;
} links[LINKS];

/* The acts that are left, and whether a source told sums that are not its data's. */
static dray__reader acts;
static bool publisher_lied, member_lied;

static void hang_up(struct link *l)
{
    close(l->fd);
    dray__writer_free(&l->out);
    *l = (struct link){0};
}

static uint16_t asked_options(const dray__data_request *header, const uint8_t *body)
{
    return header->type == DRAY__DATA_RECTS ? dray__pull_options(header, body) : 0;
}

/* The regions' answer names this process: it is another one. */
static void answer_regions(dray__writer *out, const dray__data_request *header, uint64_t token)
{
    dray__writer data = {0};
    uint64_t pid = htole64((uint64_t)w.other);
    MUST(dray__pull_regions(token, DRAY__DATA_MAX, &data, NULL) == 0);
    memcpy(data.data, &pid, sizeof pid);
    dray__answer_put(out, 0, header->id, 0, data.size);
    dray__put_bytes(out, data.data, data.size);
    dray__writer_free(&data);
}

/* As a data server would, of what is held behind `token`. */
static void answer(dray__writer *out, const dray__data_request *header, const uint8_t *asked,
                   uint64_t token, uint32_t slot)
{
    uint8_t body[DRAY__REQUEST_MAX];
    uint64_t data_bytes;
    bool arena = asked_options(header, asked) & DRAY__PULL_ARENA;
    dray_region *to = arena ? w.slots[slot] : w.staging;
    if (header->type == DRAY__DATA_REGIONS) {
        answer_regions(out, header, token);
        return;
    }
    memcpy(body, asked, header->body_bytes);
    token = htole64(token);
    memcpy(body, &token, sizeof token);
    dray__writer head = {0};
    MUST(dray__pull_answer(w.packer, header, body, to, w.slot_at[slot], &head, &data_bytes));
    dray__put_bytes(out, head.data, head.size);
    if (!arena)
        dray__put_bytes(out, dray_region_base(w.staging), data_bytes);
    dray__writer_free(&head);
}

/* The wrong data, of which it says that the publisher's bits were the right ones. */
static void lie(dray__writer *out, const dray__writer *right, uint16_t options)
{
    size_t step = dray__pull_head_bytes(true, options & DRAY__PULL_BASE);
    size_t at = DRAY__ANSWER_HEADER + (options & DRAY__PULL_ARENA ? 8 : 0);
    dray__answer a, b;
    if (!(options & DRAY__PULL_SUMS) || dray__answer_get(out->data, &a, NULL) ||
        dray__answer_get(right->data, &b, NULL) || a.status || b.status)
        return;
    for (; at + step <= DRAY__ANSWER_HEADER + a.head_bytes; at += step)
        memcpy(out->data + at, right->data + at, 8);
}

static void put_raw(dray__writer *out, uint32_t id)
{
    size_t size = dray__get_u16(&acts);
    size = size < acts.size - acts.at ? size : acts.size - acts.at;
    const uint8_t *bytes = dray__get_bytes(&acts, size);
    id = htole32(id);
    dray__writer_reset(out);
    dray__put_bytes(out, bytes, bytes ? size : 0);
    if (bytes && size >= 12)
        memcpy(out->data + 8, &id, 4);
}

static void change(dray__writer *out)
{
    for (int count = dray__get_u8(&acts) % 8; count-- > 0 && out->size;) {
        size_t at = dray__get_u16(&acts);
        out->data[at % out->size] ^= dray__get_u8(&acts);
    }
}

static void refuse(dray__writer *out, uint32_t id)
{
    uint8_t how = dray__get_u8(&acts);
    dray_error error = {.code = -(how % 32), .message = "no"};
    dray__writer_reset(out);
    for (int count = 1 + how / 32; count-- > 0;)
        dray__answer_refuse(out, id, &error);
}

/* One request, by the next act. */
static void act(struct link *l, const dray__data_request *header, const uint8_t *body)
{
    dray__writer out = {0}, wrong = {0};
    uint64_t token;
    uint16_t options = asked_options(header, body);
    uint32_t slot = options & DRAY__PULL_ARENA ? w.next_slot++ % DRAY__ARENA_HELD : 0;
    int kind = acts.at < acts.size ? dray__get_u8(&acts) % ACTS : HONEST;
    memcpy(&token, body, sizeof token);
    token = le64toh(token);
    answer(&out, header, body, token, slot);
    if (kind == TAMPERED || kind == LIED) {
        bool member = token == w.member.token;
        answer(&wrong, header, body, member ? w.wrong_member.token : w.wrong_publisher.token, slot);
        if (kind == LIED)
            lie(&wrong, &out, options);
        publisher_lied |= !member && kind == LIED;
        member_lied |= member;
        dray__writer_reset(&out);
        dray__put_bytes(&out, wrong.data, wrong.size);
    }
    if (kind == CHANGED)
        change(&out);
    if (kind == RAW)
        put_raw(&out, header->id);
    if (kind == REFUSED)
        refuse(&out, header->id);
    if (kind == LATE)
        forward_ns += 25 * DRAY__SECOND;
    size_t size = kind == CUT ? dray__get_u16(&acts) : out.size;
    size = kind == CLOSED ? 0 : size < out.size ? size : out.size;
    l->ending = kind == CLOSED || kind == CUT;
    l->silent = kind == SILENT;
    for (int i = kind == TWICE ? 2 : 1; i > 0 && !l->silent; i--)
        dray__put_bytes(&l->out, out.data, size);
    dray__writer_free(&out);
    dray__writer_free(&wrong);
}

static bool take_request(struct link *l)
{
    dray__data_request header;
    if (l->silent || l->ending || l->have < DRAY__REQUEST_HEADER)
        return false;
    MUST(dray__request_get(l->in, &header, NULL) == 0); /* our reader says what it should */
    size_t size = DRAY__REQUEST_HEADER + header.body_bytes;
    MUST(header.body_bytes <= DRAY__REQUEST_MAX);
    if (l->have < size)
        return false;
    if (dray__request_asks(header.type))
        act(l, &header, l->in + DRAY__REQUEST_HEADER);
    l->have -= size;
    memmove(l->in, l->in + size, l->have);
    return true;
}

/* What a link can do now. */
static bool turn(struct link *l)
{
    bool moved = false;
    ssize_t n = recv(l->fd, l->in + l->have, sizeof l->in - l->have, MSG_DONTWAIT);
    if (n > 0)
        l->have += (size_t)n;
    bool left = n == 0 && l->have < sizeof l->in;
    while (take_request(l))
        moved = true;
    MUST(!l->out.failed);
    ssize_t sent = l->out.size == l->out_at
                       ? 0
                       : send(l->fd, l->out.data + l->out_at, l->out.size - l->out_at,
                              MSG_DONTWAIT | MSG_NOSIGNAL);
    if (sent > 0)
        l->out_at += (size_t)sent;
    if (l->out_at == l->out.size) {
        dray__writer_reset(&l->out);
        l->out_at = 0;
    }
    if (left || (l->ending && !l->out.size))
        hang_up(l);
    return moved || n > 0 || sent > 0;
}

static void accept_one(void)
{
    struct link *l = links;
    while (l < links + LINKS && l->open)
        l++;
    MUST(l < links + LINKS);
    l->fd = accept4(w.listener, NULL, NULL, SOCK_CLOEXEC);
    l->open = l->fd >= 0;
}

static bool serve(void)
{
    bool moved = false;
    accept_one();
    for (struct link *l = links; l < links + LINKS; l++)
        if (l->open)
            moved |= turn(l);
    return moved;
}

/* ---- the update ------------------------------------------------------------------------------ */

static dray__transfer_options options_of(uint8_t scene)
{
    static const dray__networks none;
    static const dray__tls_key key;
    static const dray__stream_keys keys = {.key = &key, .trusted = &none, .transport = "stream"};
    static const bool compared[8] = {true, true, true, true, true, true, true, true};
    return (dray__transfer_options){.bucket_bytes = scene & SMALL ? 2 << 20 : 8 << 20,
                                    .verify = !(scene & UNVERIFIED),
                                    .attempt = ATTEMPT,
                                    .run = scene & COHORT ? RUN : 0,
                                    .keys = &keys,
                                    .compared = compared,
                                    .has_base = scene & BASE,
                                    .incarnation = 1,
                                    .base = 1,
                                    .version = 2};
}

static void set_scene(uint8_t scene)
{
    dray__source *publisher = &w.sources->sources[0];
    bool staged = scene & STAGED && !(scene & COHORT);
    publisher->has_delta = scene & BASE;
    publisher->staged = staged;
    publisher->host = staged ? 1 : 2;
    publisher->arena = staged ? dray__arena_region(w.arena) : NULL;
    publisher->slot_bytes = staged ? dray__arena_slot_bytes(w.arena) : 0;
    w.sources->cohort_count = scene & MAPPED ? 3 : 2;
    dray__kept_end(&w.sources->kept, NULL); /* as where the sources are made anew */
    memcpy(memory_of(&w.engine), w.before, BYTES);
}

static bool agrees(const dray__transfer *transfer)
{
    dray__sums sums = {0};
    MUST(dray__transfer_sums(transfer, &sums, NULL) == 0);
    bool same = true;
    for (uint32_t i = 0; i < w.sums.count; i++) {
        const dray__named_sum *was = &dray__sums_items(&w.sums)[i];
        const dray__named_sum *now = dray__sums_find(&sums, was->name);
        same = same && now && !now->mixed && now->elements == was->elements && now->sum == was->sum;
    }
    dray__sums_free(&sums);
    return same;
}

static void check_memory(uint64_t checked)
{
    const uint8_t *memory = memory_of(&w.engine);
    for (size_t i = 0; i < BYTES; i++)
        MUST(w.inside[i] || memory[i] == 0xEE);
    MUST(!w.ready || memcmp(memory, w.expected, checked) == 0);
}

/* As the update (update.c) and the coordinator decide. */
static bool commits(const dray__transfer *transfer, uint8_t scene)
{
    return dray__transfer_check(transfer, NULL) == 0 && (scene & UNVERIFIED || agrees(transfer));
}

/* true: the version was committed. */
static bool update(uint8_t scene, const uint8_t *data, size_t size)
{
    dray__transfer_options options = options_of(scene);
    dray__transfer *transfer;
    dray_update_report report = {0};
    dray_error error = {0};
    int rc;
    set_scene(scene);
    acts = dray__reader_of(data, size);
    publisher_lied = member_lied = false;
    dray__local_share(w.engine.token, NULL);
    rc = dray__transfer_open(w.sources, &w.destination, &options, &transfer, &error);
    MUST(rc == 0);
    int64_t late = dray__now() + UPDATE_NS;
    while ((rc = dray__transfer_step(transfer, DRAY__MILLISECOND, &error)) == DRAY_EAGAIN &&
           dray__now() < late)
        if (!serve() && dray__transfer_waits(transfer))
            forward_ns += 50 * DRAY__MILLISECOND;
    if (rc == DRAY_EAGAIN)
        dray__transfer_explain(transfer, &error);
    bool committed = rc == DRAY_OK && commits(transfer, scene);
    dray__transfer_report(transfer, &report);
    MUST(report.peak_extra_bytes <= options.bucket_bytes);
    dray__transfer_close(transfer);
    check_memory(!committed || scene & UNVERIFIED ? 0
                 : member_lied                    ? WIDENED
                 : publisher_lied                 ? NARROWED
                                                  : BYTES);
    return committed;
}

static void finish_scene(void)
{
    for (uint32_t i = 0; i < LINKS; i++)
        if (links[i].open)
            hang_up(&links[i]);
    for (uint32_t i = 0; i < 4; i++) {
        dray__source *s = i ? &w.sources->cohort[i - 1] : &w.sources->sources[0];
        dray__kept_end(&s->kept, NULL);
    }
}

static void make_servers(void)
{
    MUST(dray__stream_listen("127.0.0.1", w.endpoint, &w.listener, NULL) == 0);
    MUST(fcntl(w.listener, F_SETFL, O_NONBLOCK) == 0);
    MUST(dray_region_alloc(DRAY_REGION_HOST, DRAY__DATA_MAX, "data", &w.staging, NULL) == 0);
    w.packer = dray__packer_new();
    MUST(w.packer);
}

static void announce(void)
{
    const dray__holder holder = {.layout = w.published};
    dray__pieces pieces = {0};
    MUST(dray__pieces_make(&holder, 0, &pieces, NULL) == 0);
    MUST(dray__sum_pieces(w.published, &w.publisher.region, &pieces, &w.sums, NULL) == 0);
    dray__pieces_free(&pieces);
}

/* Which bytes the engine's blocks have. */
static void mark_blocks(void)
{
    for (uint32_t b = 0; b < dray_layout_block_count(w.held); b++) {
        const dray_block *block = dray_layout_block(w.held, b);
        size_t element =
            dray_dtype_size((dray_dtype)dray_layout_tensor(w.held, block->tensor)->dtype);
        for (int64_t row = 0; row < block->extent[0]; row++)
            memset(w.inside + block->offset + (uint64_t)(row * block->stride[0]), 1,
                   (size_t)block->extent[1] * element);
    }
}

static void make_arena(void)
{
    MUST(dray__arena_new(DRAY__ARENA_MIN, &w.arena, NULL) == 0);
    for (uint32_t i = 0; i < DRAY__ARENA_HELD; i++) {
        w.slots[i] = dray__arena_take(w.arena, &w.slot_at[i]);
        MUST(w.slots[i]);
    }
}

static void make(void)
{
    make_arena();
    w.published = make_layout(false, DRAY_REGION_HOST);
    w.held = make_layout(true, DRAY_REGION_HOST);
    w.shared = make_layout(true, DRAY_REGION_SHARED);
    publish();
    announce();
    mark_blocks();
    hold(&w.engine, w.held, DRAY_REGION_HOST, NULL, NULL);
    hold(&w.member, w.shared, DRAY_REGION_SHARED, NULL, NULL);
    hold(&w.wrong_member, w.shared, DRAY_REGION_SHARED, NULL, NULL);
    w.other = make_other();
    make_servers();
    make_sources();
    MUST(update(0, NULL, 0));
    memcpy(w.expected, memory_of(&w.engine), BYTES);
    for (int row = 0; row < ROWS; row++)
        MUST(memcmp(w.expected + KEPT + row * KEPT_STRIDE,
                    memory_of(&w.publisher) + KEPT + row * KEPT_STRIDE, ROWS * 2) == 0);
    share(&w.member, false);
    share(&w.wrong_member, true);
    w.ready = true;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    if (!w.ready)
        make();
    if (!size)
        return 0;
    update(data[0], data + 1, size - 1);
    /* What came too much on a connection that is kept may cost each of the sources one update. */
    int tries = 0;
    while (!update(data[0], NULL, 0))
        MUST(++tries < 4);
    finish_scene();
    return 0;
}

/* ---- what it begins with --------------------------------------------------------------------- */

static void put_scene(fuzz_put put, void *user, uint8_t scene)
{
    static const uint8_t changes[] = {2, 20, 0, 1, 90, 0, 7};
    dray__writer body = {0};
    put(user, &scene, 1);
    for (uint8_t kind = CHANGED; kind < ACTS; kind++) {
        dray__put_u8(&body, kind);
        if (kind == RAW) {
            dray__put_u16(&body, DRAY__ANSWER_HEADER + 32 + 100);
            dray__answer_put(&body, 0, 0, 32, 100);
            for (int i = 0; i < 132; i++)
                dray__put_u8(&body, (uint8_t)i);
        }
        if (kind == CHANGED)
            dray__put_bytes(&body, changes, sizeof changes);
        if (kind == REFUSED)
            dray__put_u8(&body, -DRAY_EAGAIN);
        if (kind == CUT)
            dray__put_u16(&body, 50);
        dray__put_u16(&body, 0); /* two that are as they should be */
    }
    fuzz_put_kind(put, user, scene, &body);
    dray__writer_free(&body);
}

static void put_one(fuzz_put put, void *user, uint8_t scene, uint8_t kind, uint8_t argument)
{
    const uint8_t first[] = {scene, kind, argument, 0, 0},
                  second[] = {scene, HONEST, kind, argument, 0, 0};
    put(user, first, sizeof first);
    put(user, second, sizeof second);
}

void fuzz_seeds(fuzz_put put, void *user)
{
    static const uint8_t scenes[] = {
        0,      BASE,          SMALL,          COHORT,       COHORT | MAPPED,
        STAGED, STAGED | BASE, SMALL | COHORT, SMALL | BASE, UNVERIFIED};
    for (size_t i = 0; i < sizeof scenes; i++) {
        put_scene(put, user, scenes[i]);
        for (uint8_t kind = TAMPERED; kind < ACTS; kind++)
            put_one(put, user, scenes[i], kind, -DRAY_EAGAIN);
        put_one(put, user, scenes[i], REFUSED, 32 - DRAY_EAGAIN); /* twice */
        put_one(put, user, scenes[i], REFUSED, 32 - DRAY_EUNSUPPORTED);
    }
}
