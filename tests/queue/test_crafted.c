/* Tests journals that a stranger wrote. Every record is as a controller writes it, except for one
 * change, and its sums are right. The error says where such a journal is wrong and what was
 * expected, and no table is made of half of it. */
#include "queue/fixture.h"

#include "queue/journal/ledger.h"
#include "queue/journal/record.h"
#include "seed.h"

#include <fcntl.h>

#define I(kind) DRAY__RECORD_##kind

enum { MOST = 24, ROLLOUT = 0, ACTOR = 2 };

typedef struct line { /* a record of the journal */
    uint16_t kind;
    uint32_t owner;
    dray__writer body;
} line;

typedef struct script {
    line lines[MOST];
    uint32_t count;
} script;

static queue_fixture f;

static dray__writer *line_new(script *s, uint16_t kind, uint32_t owner)
{
    line *added = &s->lines[s->count++];
    *added = (line){.kind = kind, .owner = owner};
    return &added->body;
}

static void script_free(script *s)
{
    for (uint32_t i = 0; i < s->count; i++)
        dray__writer_free(&s->lines[i].body);
}

/* ---- what a controller writes ---------------------------------------------------------------- */

static void put_request(dray__writer *w, uint32_t ticket)
{
    dray__put_u64(w, 77); /* the client's identity */
    dray__put_u32(w, ticket);
}

static void put_no_tags(dray__writer *w)
{
    dray__put_u32(w, 0);
    dray__put_u32(w, 0);
}

static void put_column(dray__writer *w, const char *name, bool ragged, uint64_t bytes)
{
    dray__column_spec spec = {.dtype = DRAY_I64, .ndim = ragged, .ragged = ragged};
    dray__put_u32(w, 1);
    dray__put_string(w, name);
    dray__put_fields(w, &dray__spec_fields, &spec);
    dray__put_u64(w, bytes);
}

static void put_insert(script *s, const char *name, uint32_t owner, uint32_t rows, uint32_t group,
                       uint32_t first, uint64_t refill)
{
    dray__writer *w = line_new(s, I(INSERT), owner);
    put_request(w, s->count);
    dray__put_string(w, name);
    dray__put_u32(w, first);
    dray__put_u32(w, rows);
    dray__put_u32(w, group);
    dray__put_u8(w, 0);
    dray__put_u64(w, 16); /* bytes a row */
    dray__put_u64(w, refill);
    put_column(w, "prompts", false, 8 * (uint64_t)rows);
    put_no_tags(w);
    for (uint32_t i = 0; i < rows; i++)
        dray__put_u64(w, i);
}

static void put_rows(dray__writer *w, uint32_t task, uint64_t number, uint32_t slot, uint32_t count)
{
    dray__put_u32(w, task);
    dray__put_u64(w, number);
    dray__put_u32(w, count);
    for (uint32_t i = 0; i < count; i++) {
        dray__put_u32(w, slot + i);
        dray__put_u32(w, 1);
    }
}

/* Rows 0 and 1 of the first partition, one value each. */
static void put_rollout(script *s)
{
    dray__writer *w = line_new(s, I(COMMIT), 1);
    put_request(w, s->count);
    put_rows(w, ROLLOUT, 0, 0, 2);
    put_column(w, "responses", true, 16);
    put_no_tags(w);
    dray__put_u32(w, 0); /* rows that stay open */
    for (uint64_t i = 0; i < 5; i++)
        dray__put_u64(w, i); /* three offsets and two values */
}

static void put_actor(script *s)
{
    dray__writer *w = line_new(s, I(COMMIT), 1);
    put_request(w, s->count);
    put_rows(w, ACTOR, 1, 0, 1);
    dray__put_u32(w, 0);
    put_no_tags(w);
    dray__put_u32(w, 0);
}

static void put_loss(script *s, uint32_t owner, uint32_t slot, uint64_t demand)
{
    dray__writer *w = line_new(s, I(LOSS), owner);
    dray__put_u32(w, slot);
    dray__put_u32(w, owner);
    dray__put_u32(w, ROLLOUT);
    dray__put_u32(w, 3);
    dray__put_u32(w, DRAY_LOSS_FAILED);
    dray__put_string(w, "late");
    dray__put_u64(w, demand);
}

static void put_admission(dray__writer *w)
{
    dray__put_u32(w, 4); /* rows a batch */
    dray__put_u32(w, ROLLOUT);
    dray__put_u32(w, 1);
    dray__put_u32(w, 0);
    dray__put_u64(w, 5);
    dray__put_u64(w, 20);
}

static void put_state(script *s)
{
    dray__writer *w = line_new(s, I(STATE), 0);
    dray__column_spec spec = {.dtype = DRAY_I64};
    dray__put_u32(w, 4);
    dray__put_u32(w, 1);
    dray__put_u64(w, 1);
    dray__put_u64(w, 1);
    dray__put_u8(w, 0);
    put_admission(w);
    dray__put_u32(w, 1);
    dray__put_string(w, "prompts");
    dray__put_fields(w, &dray__spec_fields, &spec);
    dray__put_u32(w, 1);
    dray__put_string(w, "gone");
    dray__put_u64(w, 1);
    dray__put_u64(w, 0);
    dray__put_u32(w, 0); /* keyed partitions */
    dray__put_u32(w, 1); /* requests that have counted */
    dray__put_u64(w, 9);
    for (uint32_t i = 1; i <= 3; i++)
        dray__put_u32(w, i);
}

static void put_fields(script *s, uint16_t kind, uint32_t owner, const void *body)
{
    dray__put_fields(line_new(s, kind, owner), dray__record_kinds[kind].fields, body);
}

/* Rows x and y of keyed partition 5, one of which is consumed, and both dropped. */
static void put_keyed(script *s)
{
    static const char *const keys[] = {"x", "y"};
    static const dray__row_at at[] = {{0, 6, 1}, {1, 6, 1}};
    static const dray__note notes[] = {{true, "n", 1}, {false, NULL, 0}};
    static const dray__new_column column = {
        .name = "v", .spec = {.dtype = DRAY_I64}, .extent.bytes = 16};
    const dray__keyed_record put = {.identity = 77,
                                    .generation = 5,
                                    .put = {.partition = "k",
                                            .rows = 2,
                                            .ticket = s->count + 1,
                                            .named = {keys, at, 2, 2},
                                            .notes = notes,
                                            .note_count = 2,
                                            .columns = &column,
                                            .column_count = 1}};
    const dray__used_record take = {.task = "t", .rows = {.at = at, .at_count = 1}},
                            drop = {.task = "", .rows = {.at = at, .at_count = 2}};
    put_fields(s, I(PUT), 6, &put);
    for (uint64_t i = 0; i < 2; i++)
        dray__put_u64(&s->lines[s->count - 1].body, i);
    put_fields(s, I(TAKE), 5, &take);
    put_fields(s, I(RESET), 5, &(dray__used_record){.task = "t"});
    put_fields(s, I(TAKE), 5, &take);
    put_fields(s, I(DROP), 5, &drop);
}

/* Where each record is. */
enum {
    OPEN,
    INSERT,
    OTHER,
    COMMIT,
    TRAINED,
    LOSS,
    REFILL,
    LOSS_2,
    DECLINE,
    SEAL,
    COVER,
    RESUME,
    ADMIT,
    STATE,
    START,
    PUT,
    TAKE,
    RESET,
    TAKE_2,
    DROP,
    CLEAR,
    DONE,
    END,
    LINES
};

static void write_script(script *s)
{
    *s = (script){0};
    dray__put_u8(line_new(s, I(OPEN), 0), 0);
    put_insert(s, "a", 1, 4, 2, 0, 0);
    put_insert(s, "b", 2, 2, 1, 0, 0);
    put_rollout(s);
    put_actor(s);
    put_loss(s, 1, 2, 3); /* with row 3, of the same group */
    put_insert(s, "a", 1, 2, 2, 2, 3);
    put_loss(s, 2, 0, 4);
    dray__put_u64(line_new(s, I(DECLINE), 2), 4);
    dray__put_u32(line_new(s, I(SEAL), 2), 2);
    dray__writer *w = line_new(s, I(COVER), 0);
    dray__put_u32(w, 0);
    dray__put_u64(w, 1);
    w = line_new(s, I(RESUME), 0);
    dray__put_u32(w, 0);
    dray__put_u64(w, 1);
    dray__put_u64(w, 5);
    put_admission(line_new(s, I(ADMIT), 0));
    put_state(s);
    line_new(s, I(START), 0);
    put_keyed(s);
    line_new(s, I(CLEAR), 2);
    line_new(s, I(DONE), 0);
    line_new(s, I(END), 0);
    assert_int_equal(s->count, LINES);
    for (uint32_t i = 0; i < s->count; i++)
        if (dray__record_kinds[s->lines[i].kind].asked)
            put_request(&s->lines[i].body, 100 + i);
}

/* ---- reading --------------------------------------------------------------------------------- */

static int make(void *user, dray__reader *opening, dray__table **out, dray_error *said)
{
    static const char *const prompts[] = {"prompts"}, *const responses[] = {"responses"};
    static const dray__task_names tasks[] = {
        {.name = "rollout",
         .needs = prompts,
         .needs_count = 1,
         .writes = responses,
         .writes_count = 1},
        {.name = "reward", .needs = responses, .needs_count = 1},
        {.name = "actor", .needs = responses, .needs_count = 1},
    };
    (void)user, (void)opening;
    dray__settings settings = {
        .capacity_rows = 100, .capacity_bytes = 4096, .provisional = 1 << ACTOR};
    return dray__table_new("samples", tasks, 3, &settings, out, said);
}

static char path[128];

static void write_journal(const script *s)
{
    dray__journal *journal;
    dray__journal_options options = {.path = path};
    unlink(path);
    OK(dray__journal_start(&options, 0, 0, &journal, &error));
    for (uint32_t i = 0; i < s->count; i++) {
        dray__journal_entry *entry = calloc(1, sizeof *entry);
        assert_non_null(entry);
        entry->kind = s->lines[i].kind;
        entry->owner = s->lines[i].owner;
        dray__put_bytes(&entry->body, s->lines[i].body.data, s->lines[i].body.size);
        dray__journal_add(journal, entry);
    }
    for (dray__journal_entry *entry = dray__journal_stop(journal), *next; entry; entry = next) {
        next = entry->next;
        dray__entry_free(entry);
    }
}

static int read_journal(dray__table **out, dray_error *said)
{
    dray__ledger_options options = {.path = path, .keeper_path = f.keeper};
    return dray__ledger_recover(&options, make, NULL, out, said);
}

static int read_script(const script *s, dray_error *said)
{
    dray__table *table = NULL;
    *said = (dray_error){0};
    write_journal(s);
    int rc = read_journal(&table, said);
    assert_true(!rc == (table != NULL));
    dray__table_free(table);
    return rc;
}

FIXTURE(up)
{
    f = (queue_fixture){0};
    const char *tmp = getenv("TMPDIR");
    snprintf(f.folder, sizeof f.folder, "%.40s/dray-test-XXXXXX", tmp ? tmp : "/tmp");
    if (!mkdtemp(f.folder))
        die("mkdtemp", NULL);
    snprintf(f.keeper, sizeof f.keeper, "%s/keeper", f.folder);
    snprintf(path, sizeof path, "%s/crafted", f.folder);
    f.keeper_pid = fixture_spawn(&f, true);
    return 0;
}

FIXTURE(down)
{
    unlink(path);
    int status = fixture_end(f.keeper_pid, SIGTERM);
    return status || rmdir(f.folder) < 0;
}

TEST_WITHIN(test_as_written, up, down)
{
    script s;
    dray__table *table;
    write_script(&s);
    write_journal(&s);
    OK(read_journal(&table, &error));
    assert_int_equal(table->partition_count, 1);
    assert_int_equal(table->partitions[0]->tracks[ACTOR].done_count, 1);
    assert_int_equal(table->generations, 6);
    assert_null(table->keyed);
    assert_int_equal(table->kept, 0);
    assert_true(table->ended);
    dray__table_free(table);
    script_free(&s);
}

/* ---- one thing is wrong ---------------------------------------------------------------------- */

enum { OWNER = -1, KIND = -2 };

/* Of record `line` the number at byte `at` of its body, `bytes` long (or its owner, or kind), is
 * `value`; what the error says. */
static const struct crafted {
    uint32_t line;
    int at, bytes;
    uint64_t value;
    const char *expected;
} cases[] = {
    {OPEN, KIND, 2, I(SEAL), "a queue's opening expected, found a record of kind 5"},
    {START, KIND, 2, I(OPEN), "one opening expected"},
    {START, KIND, 2, 99, "records of kind 99 are not known"},
    {START, KIND, 2, 0, "records of kind 0 are not known"},
    {START, OWNER, 4, 1, "no owner expected, found 1"},

    {INSERT, OWNER, 4, 0, "a partition's record expected, found no owner"},
    {INSERT, OWNER, 4, UINT32_MAX, "a number greater than 0 expected, found 4294967295"},
    {OTHER, OWNER, 4, 1, "a number greater than 1 expected, found 1"},
    {INSERT, 17, 4, 1, "rows from slot 0 of generation 1 expected, found 1 of 1"},
    {INSERT, 21, 4, 0, "1 to 67108864 rows, found 0"},
    {INSERT, 21, 4, 6, "6 items of 8 bytes, found 32 bytes"},
    {INSERT, 21, 4, UINT32_MAX, "1 to 67108864 rows, found 4294967295"},
    {INSERT, 25, 4, 3, "4 rows are no whole number of groups of 3"},
    {INSERT, 25, 4, UINT32_MAX, "no whole number of groups"},
    {INSERT, 29, 1, 1, "items of 8 bytes"},
    {INSERT, 30, 8, UINT64_MAX, "overflow"},
    {INSERT, 30, 8, 1025, "can never fit into 100 rows, 4096 bytes"},
    {INSERT, 38, 8, 9, "refill 9 of a: it was answered"},
    {INSERT, 46, 4, 2, "short or malformed"},
    {INSERT, 46, 4, UINT32_MAX, "short or malformed"},
    {INSERT, 54, 1, 0, "that is not UTF-8"}, /* a zero in a name */
    {INSERT, 54, 1, 'q', "found row 0, which is without a column that the task needs"},
    {INSERT, 61, 4, 99, "unknown dtype 99"},
    {INSERT, 65, 4, UINT32_MAX, "unknown content -1"},
    {INSERT, 69, 4, 99, "99 dimensions"},
    {INSERT, 73, 1, 1, "column prompts: its bytes are missing"},
    {INSERT, 106, 8, UINT64_MAX, "its bytes are missing"},
    {INSERT, 106, 8, (uint64_t)-8, "its bytes are missing"},
    {INSERT, 106, 8, 24, "expected 146 bytes, found 154"},
    {INSERT, 114, 4, 7, "record: "},
    {REFILL, 21, 4, 1, "refill 3: 2 rows for partition a expected, found 1"},
    {REFILL, 38, 8, 4, "refill 4 of a"},
    {REFILL, OWNER, 4, 2, "partition a has generation 1, found 2"},

    {COMMIT, OWNER, 4, 9, "a partition that is there expected, found generation 9"},
    {COMMIT, 12, 4, 3, "one of 3 tasks expected, found number 3"},
    {COMMIT, 12, 4, UINT32_MAX, "one of 3 tasks expected"},
    {COMMIT, 12, 4, 1, "found row 0, which is without a column that the task needs"},
    {COMMIT, 24, 4, 0, "COMMIT: record: a control character in a name"},
    {COMMIT, 24, 4, UINT32_MAX, "COMMIT: record: short or malformed"},
    {COMMIT, 28, 4, 1, "found row 1, which is named twice"}, /* a slot twice */
    {COMMIT, 36, 4, 0, "found row 0, which is named twice"},
    {COMMIT, 36, 4, 4, "one of 4 rows expected, found 4"},
    {COMMIT, 36, 4, 0x7FFFFFFF, "one of 4 rows expected"},
    {COMMIT, 40, 4, 3, "row 1: generation 1 expected, found 3"},
    {COMMIT, 52, 1, 'q', "column responses was not set"},
    {COMMIT, 106, 8, UINT64_MAX, "its bytes are missing"},
    {COMMIT, 122, 4, 1, "column responses: its bytes are missing"},
    {TRAINED, 16, 8, 0, "a commit after number 0 expected, found 0"},
    {TRAINED, 16, 8, UINT64_MAX, "a commit after number 0 expected"},
    {TRAINED, 28, 4, 2, "found row 2, which is without a column that the task needs"},
    {TRAINED, 12, 4, ROLLOUT, "found row 0, which is committed already"},

    {LOSS, OWNER, 4, 7, "a partition that is there expected"},
    {LOSS, 0, 4, 4, "one of 4 rows expected, found 4"},
    {LOSS, 0, 4, UINT32_MAX, "one of 4 rows expected"},
    {LOSS, 0, 4, 0, "open for task rollout expected, found row 0"}, /* committed */
    {LOSS, 4, 4, 9, "row 2: generation 1 expected, found 9"},
    {LOSS, 8, 4, 64, "one of 3 tasks expected, found number 64"},
    {LOSS, 16, 4, 4, "one of 4 causes of a loss expected, found 4"},
    {LOSS, 20, 4, 1 << 20, "short or malformed"},
    {LOSS, 28, 8, 2, "a number greater than 2 expected, found 2"},
    {LOSS, 28, 8, UINT64_C(1) << 32, "a number greater than 2 expected, found 4294967296"},
    {REFILL, KIND, 2, I(LOSS), "LOSS: record: short or malformed"},
    {LOSS_2, 0, 4, 2, "one of 2 rows expected, found 2"},

    {DECLINE, 0, 8, 99, "refill 99: there never was one"},
    {DECLINE, 0, 8, 0, "refill 0: there never was one"},
    {DECLINE, OWNER, 4, 1, "refill 4 is of partition b, found a"},
    {DECLINE, OWNER, 4, 12, "a partition that is there expected, found generation 12"},
    {SEAL, 0, 4, 3, "seal of b at 3 rows: it holds 2"},
    {SEAL, OWNER, 4, 3, "a partition that is there expected, found generation 3"},
    {DONE, OWNER, 4, 1, "no owner expected, found 1"},
    {CLEAR, OWNER, 4, 9, "a partition of generation 1 to 6 expected, found 9"},
    {RESUME, 0, 4, UINT32_MAX, "commit 1 of epoch 4294967295: impossible"},
    {RESUME, 4, 8, UINT64_MAX, "impossible"},
    {RESUME, 12, 8, UINT64_MAX, "a whole number expected"},
    {ADMIT, 4, 4, 3, "one of 3 tasks expected, found 3"},
    {ADMIT, 16, 8, UINT64_MAX, "at most version"},
    {ADMIT, 24, 8, UINT64_MAX, "at most version"},
    {STATE, 0, 4, 3, "at least 4 generations expected, found 3"},
    {STATE, 0, 4, UINT32_MAX, "at least 4 generations expected"},
    {STATE, 4, 4, 0, "epoch 1 or a later one expected, found 0"},
    {STATE, 8, 8, 0, "commit 1 or a later one expected, found 0"},
    {STATE, 16, 8, UINT64_MAX, "resumed at 18446744073709551615"},
    {STATE, 29, 4, 64, "one of 3 tasks expected, found 64"},
    {STATE, 57, 4, 9999, "record: short or malformed"},
    {STATE, 72, 4, 5,
     "column prompts: rows of I64 [] expected"}, /* another dtype than the rows that are there */
    {START, KIND, 2, I(SPACE), "SPACE: "},

    {PUT, OWNER, 4, 4, "a number greater than 4 expected, found 4"},
    {PUT, OWNER, 4, 5, "a partition older than put 5 expected, found 5"},
    {PUT, 17, 4, 0, "a partition older than put 6 expected, found 0"},
    {PUT, 16, 1, 'a', "a partition of rows with keys expected"},
    {PUT, 21, 4, 3, "a tag for each of 3 rows expected, found 2"},
    {PUT, 21, 4, 0, "1 to 65536 rows expected, found 0"},
    {PUT, 33, 1, 'y', "is there twice"},
    {PUT, 43, 4, 1, "row 1, key y, is there twice"},
    {PUT, 43, 4, 100, "a row below 100 of generation 1 to 6 expected, found 100 of 6"},
    {PUT, 47, 4, 0, "generation 1 to 6 expected, found 0 of 0"},
    {PUT, 47, 4, 7, "generation 1 to 6 expected, found 0 of 7"},
    {PUT, 72, 4, 1 << 20, "short or malformed"},
    {PUT, 91, 4, 99, "unknown dtype 99"},
    {TAKE, OWNER, 4, 9, "a keyed partition that is there expected, found generation 9"},
    {TAKE, OWNER, 4, 1, "a keyed partition that is there expected, found generation 1"},
    {TAKE, 13, 4, 9, "row 9 of generation 6 is not there any more"},
    {TAKE, 17, 4, 5, "row 0 of generation 5 is not there any more"},
    {TAKE, KIND, 2, I(RESET), "no rows expected, found 1"},
    {RESET, KIND, 2, I(TAKE), "rows expected, found 0"},
    {RESET, 4, 1, 's', "row 0 was consumed by t before"},
    {DROP, 12, 4, 9, "row 9 of generation 6 is not there any more"},
};

static void set(line *l, const struct crafted *c)
{
    if (c->at == OWNER) {
        l->owner = (uint32_t)c->value;
    } else if (c->at == KIND) {
        bool asked = dray__record_kinds[l->kind].asked;
        bool asks = c->value < I(KINDS) && dray__record_kinds[c->value].asked;
        l->kind = (uint16_t)c->value;
        if (asks && !asked)
            put_request(&l->body, 99);
        else if (!asks && asked)
            l->body.size -= 12;
    } else {
        assert_true((size_t)c->at + (size_t)c->bytes <= l->body.size);
        for (int i = 0; i < c->bytes; i++)
            l->body.data[c->at + i] = (uint8_t)(c->value >> (8 * i));
    }
}

static int expect_refused(const script *s, const char *what, const char *expected)
{
    int rc = read_script(s, &error);
    bool says = rc && strstr(error.message, expected) && strstr(error.message, path) &&
                strstr(error.message, "at byte ");
    if (!says)
        fprintf(stderr, "%s: '%s' expected, found %s: %s\n", what, expected, dray_error_name(rc),
                rc ? error.message : "");
    return !says;
}

TEST_WITHIN(test_one_number, up, down)
{
    int wrong = 0;
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        script s;
        char what[64];
        write_script(&s);
        set(&s.lines[cases[i].line], &cases[i]);
        snprintf(what, sizeof what, "case %zu, line %u at %d", i, cases[i].line, cases[i].at);
        wrong += expect_refused(&s, what, cases[i].expected);
        script_free(&s);
    }
    assert_int_equal(wrong, 0);
}

/* Bodies that end early, or late: every record at every length. */
TEST_WITHIN(test_lengths, up, down)
{
    int wrong = 0;
    for (uint32_t k = 1; k < LINES; k++) {
        script s;
        char what[64];
        write_script(&s);
        size_t whole = s.lines[k].body.size;
        for (size_t size = 0; size < whole; size++) {
            s.lines[k].body.size = size;
            snprintf(what, sizeof what, "line %u, %zu of %zu bytes", k, size, whole);
            wrong += expect_refused(&s, what, "");
        }
        s.lines[k].body.size = whole;
        dray__put_u8(&s.lines[k].body, 0);
        snprintf(what, sizeof what, "line %u, a byte more", k);
        wrong += expect_refused(&s, what, "");
        script_free(&s);
    }
    assert_int_equal(wrong, 0);
}

/* Records left out, repeated, exchanged, and with bytes changed at random: an error or a table. */
TEST_WITHIN(test_random, up, down)
{
    uint64_t seed = test_seed(), random = seed;
    for (int i = 0; i < test_times(400); i++) {
        script s;
        write_script(&s);
        for (int changes = 0; changes < 1 + i % 3; changes++) {
            random = random * UINT64_C(6364136223846793005) + UINT64_C(1442695040888963407);
            line *l = &s.lines[1 + (random >> 33) % (LINES - 1)];
            line *m = &s.lines[1 + (random >> 45) % (LINES - 1)], other = *m;
            if (random >> 62 == 0) {
                *m = *l;
                *l = other;
            } else if (random >> 62 == 1) {
                l->owner = (uint32_t)(random >> 40) % 5;
            } else if (l->body.size) {
                l->body.data[(random >> 20) % l->body.size] = (uint8_t)(random >> 50);
            }
        }
        if (read_script(&s, &error))
            assert_non_null(strstr(error.message, path));
        script_free(&s);
    }
}

TEST_WITHIN(test_a_commit_has_rows, up, down)
{
    script s;
    write_script(&s);
    dray__writer *w = &s.lines[TRAINED].body;
    dray__writer_reset(w);
    put_request(w, 9);
    put_rows(w, ACTOR, 1, 0, 0);
    dray__put_u32(w, 0);
    put_no_tags(w);
    dray__put_u32(w, 0);
    assert_int_equal(expect_refused(&s, "no rows", "a commit of at least one row expected"), 0);
    script_free(&s);
}

/* Keyed partitions as a state has them: one that is none, or of no number, or with a tag that is
 * nowhere. */
TEST_WITHIN(test_images, up, down)
{
    static const char *const tasks[] = {"t", "t"};
    const dray__image_row row = {.row = {.at = {0, 4, 1}, .key = "x"}};
    const dray__image_row far = {.row = {.at = {100, 4, 1}, .key = "x"}};
    const dray__image_row noted = {.row = {.at = {0, 4, 1}, .key = "x", .note = {false, "n", 1}}};
    const struct {
        dray__image image;
        const char *expected; /* NULL: nothing is wrong */
    } images[] = {
        {{.name = "k", .generation = 3, .rows = &row, .row_count = 1}, NULL},
        {{.name = "a", .generation = 3, .rows = &row, .row_count = 1},
         "one of rows with keys expected, found one whose rows are claimed"},
        {{.name = "k", .rows = &row, .row_count = 1}, "generation 1 to 6 expected, found 0"},
        {{.name = "k", .generation = 7, .rows = &row, .row_count = 1},
         "generation 1 to 6 expected, found 7"},
        {{.name = "k", .generation = 3, .rows = &far, .row_count = 1},
         "a row below 100 of generation 1 to 6 expected, found 100 of 4"},
        {{.name = "k", .generation = 3, .rows = &noted, .row_count = 1},
         "a tag of at most 65536 bytes expected, found 1 of none"},
        {{.name = "k",
          .generation = 3,
          .tasks = tasks,
          .task_count = 2,
          .rows = &row,
          .row_count = 1},
         "task t is there twice"},
    };
    int wrong = 0;
    for (size_t i = 0; i < sizeof images / sizeof *images; i++) {
        script s;
        dray__image image = images[i].image;
        const dray__state_record body = {.generations = 6,
                                         .epoch = 1,
                                         .commit_seq = 1,
                                         .resumed_seq = 1,
                                         .admission.task = DRAY__NONE,
                                         .kept = &image,
                                         .kept_count = 1};
        write_script(&s);
        for (uint32_t k = STATE; k < LINES; k++)
            dray__writer_free(&s.lines[k].body);
        s.count = STATE;
        put_fields(&s, I(STATE), 0, &body);
        if (images[i].expected)
            wrong += expect_refused(&s, image.name, images[i].expected);
        else
            OK(read_script(&s, &error));
        script_free(&s);
    }
    assert_int_equal(wrong, 0);
}

/* A bit of no task would be looked up in every partition when the run goes back. */
TEST(test_provisional)
{
    dray__table *table = NULL;
    static const dray__task_names tasks[] = {{.name = "actor"}};
    dray__settings settings = {.provisional = 2};
    FAILS(DRAY_EINVALID, dray__table_new("samples", tasks, 1, &settings, &table, &error));
    assert_non_null(strstr(error.message, "provisional ones among its 1 tasks expected, found 2"));
}

/* ---- the order of records -------------------------------------------------------------------- */

typedef struct numbers { /* of a record */
    uint64_t seq, safe;
} numbers;

/* Records of one word each; *broken: the one of these whose body is changed then, from 1. */
static void write_records(const numbers *records, uint32_t count, uint32_t broken)
{
    dray__output out;
    uint64_t salt, at = 0;
    int fd = open(path, O_RDWR | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);
    assert_true(fd >= 0);
    OK(dray__head_write(&dray__journal_real_files, fd, path, &salt, &error));
    OK(dray__output_init(&out, &dray__journal_real_files, &error));
    dray__output_to(&out, fd, path, salt, DRAY__FILE_HEAD);
    for (uint32_t i = 0; i < count; i++) {
        dray__journal_entry entry = {.kind = 1, .seq = records[i].seq};
        dray__put_u64(&entry.body, i);
        at = i + 1 == broken ? dray__output_end(&out) : at;
        OK(dray__output_entry(&out, &entry, records[i].safe, NULL, &error));
        dray__writer_free(&entry.body);
    }
    OK(dray__output_flush(&out, &error));
    dray__output_free(&out);
    if (broken)
        assert_int_equal(pwrite(fd, "?", 1, (off_t)at + DRAY__RECORD_HEAD), 1);
    close(fd);
}

static int count_record(void *user, const dray__journal_record *record, dray_error *said)
{
    (void)record, (void)said;
    ++*(uint32_t *)user;
    return DRAY_OK;
}

/* How many records are read before the end, or what is wrong. */
static int read_records(uint32_t *count, dray_error *said)
{
    uint64_t end, last;
    *count = 0;
    return dray__journal_read(path, count_record, count, &end, &last, said);
}

TEST_WITHIN(test_numbers_go_up, up, down)
{
    static const numbers again[] = {{1, 0}, {2, 0}, {2, 0}}, back[] = {{1, 0}, {3, 0}, {2, 0}},
                         gap[] = {{1, 0}, {3, 0}, {7, 0}};
    uint32_t count;
    (void)state;
    write_records(gap, 3, 0);
    OK(read_records(&count, &error));
    assert_int_equal(count, 3);
    write_records(again, 3, 0);
    assert_int_equal(read_records(&count, &error), DRAY_EFORMAT);
    assert_non_null(strstr(error.message, "a record after number 2 expected, found 2"));
    write_records(back, 3, 0);
    assert_int_equal(read_records(&count, &error), DRAY_EFORMAT);
}

/* A broken record ends the journal, unless a later one says that this one was safe on the disk. */
TEST_WITHIN(test_safe_records_are_whole, up, down)
{
    static const numbers unsafe[] = {{1, 0}, {2, 0}, {3, 1}}, safe[] = {{1, 0}, {2, 0}, {3, 2}};
    uint32_t count;
    (void)state;
    write_records(unsafe, 3, 2);
    OK(read_records(&count, &error));
    assert_int_equal(count, 1);
    write_records(safe, 3, 2);
    assert_int_equal(read_records(&count, &error), DRAY_ECHECKSUM);
    assert_non_null(strstr(error.message, "it had been safe"));
}

SUITE(NULL, NULL)
