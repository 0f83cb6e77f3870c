/* Tests that docs/wire.md lists the fields of messages and records as in their tables.
 * `house_test_wire PAGE` writes the list into the page, between its two marks. */
#include "control/frame.h"
#include "control/messages.h"
#include "control/relay.h"
#include "net/cells.h"
#include "net/messages.h"
#include "net/ucx.h"
#include "queue/client/client.h"
#include "queue/journal/record.h"
#include "queue/journal/records.h"
#include "suite.h"
#include "weights/messages.h"
#include "weights/server/pull.h"
#include "weights/sums.h"

#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

typedef struct message {
    const char *name; /* NULL: the end */
    const dray__fields *fields;
} message;

static const message sessions[] = {
    {"every frame's header", &dray__frame_header_fields},
    {"HELLO, first; RETURN, first", &dray__spoken_fields},
    {"HELLO, then; RETURN, then", &dray__hello_fields},
    {"RETURN, last", &dray__return_fields},
    {"answer of HELLO, of RETURN", &dray__hello_told_fields},
    {"ATTACH", &dray__attach_fields},
    {"BARRIER", &dray__meeting_fields},
    {"answer of BARRIER", &dray__met_fields},
    {"REPORT_POST", &dray__posting_fields},
    {"REPORT_WATCH", &dray__report_wish_fields},
    {"answer of REPORT_WATCH", &dray__reports_told_fields},
    {"LEASE_TAKE", &dray__lease_wish_fields},
    {"LEASE_CHECK", &dray__lease_held_fields},
    {"answer of LEASE_TAKE; LEASE_GIVE", &dray__u64_fields},
    {"answer of LEASE_CHECK", &dray__u32_fields},
    {"an error reply", &dray__error_told_fields},
    {0},
};

static const message hosts[] = {
    {"HOST_ASK", &dray__host_ask_fields},        {"answer of HOST_ASK", &dray__host_told_fields},
    {"HOST_NEXT", &dray__host_next_fields},      {"answer of HOST_NEXT", &dray__host_asks_fields},
    {"answer of HOST_CLOCK", &dray__u64_fields}, {0},
};

static const message weights[] = {
    {"of n sums, each", &dray__named_sum_fields},
    {"PUBLISHER_OPEN", &dray__publisher_open_fields},
    {"PUBLISHER_OPEN of one that comes back, then; then sums", &dray__publisher_claim_fields},
    {"SUBSCRIBER_OPEN", &dray__subscriber_open_fields},
    {"SUBSCRIBER_OPEN of one that comes back, then", &dray__subscriber_claim_fields},
    {"answer of PUBLISHER_OPEN, of SUBSCRIBER_OPEN: the key; WEIGHTS_CLOSE, GROUP_STATE, "
     "PREFETCH_DROP, REGIONS_REVOKED",
     &dray__u64_fields},
    {"REGION_PUT", &dray__region_given_fields},
    {"REGION_GET", &dray__region_asked_fields},
    {"answer of REGION_GET", &dray__handle_told_fields},
    {"UPDATE_SOURCES", &dray__sources_asked_fields},
    {"answer of UPDATE_SOURCES, trainer", &dray__trainer_told_fields},
    {"answer of UPDATE_SOURCES, members", &dray__members_told_fields},
    {"PUBLISH, then sums", &dray__announcing_fields},
    {"PUBLISH_SUMS, then sums", &dray__summing_fields},
    {"PUBLISHER_WAIT", &dray__draining_fields},
    {"answer of PUBLISHER_WAIT", &dray__drained_fields},
    {"PUBLISHER_DELIVER", &dray__delivering_fields},
    {"UPDATE_BEGIN", &dray__update_wish_fields},
    {"answer of UPDATE_BEGIN", &dray__update_begun_fields},
    {"UPDATE_WRITING", &dray__writing_fields},
    {"UPDATE_VOTE, then sums", &dray__voting_fields},
    {"answer of UPDATE_VOTE", &dray__committed_fields},
    {"UPDATE_REPORT", &dray__update_told_fields},
    {"answer of GROUP_STATE", &dray__group_told_fields},
    {"CHECKSUMS_GET", &dray__sums_asked_fields},
    {"answer of CHECKSUMS_GET, then sums", &dray__sums_told_fields},
    {"SUBSCRIBER_LEAVE, REGIONS_RELEASE", &dray__timed_fields},
    {"answer of SUBSCRIBER_LEAVE", &dray__u32_fields},
    {"ENGINES_WATCH", &dray__watching_fields},
    {"answer of ENGINES_WATCH", &dray__engines_told_fields},
    {"REGIONS_MOVE", &dray__moving_fields},
    {"answer of REGIONS_MOVE", &dray__u64_fields},
    {"answer of REGIONS_RELEASE", &dray__pins_told_fields},
    {"REGIONS_DROP", &dray__set_told_fields},
    {"answer of REGIONS_REVOKED", &dray__sets_told_fields},
    {0},
};

static const message queue[] = {
    {"OPEN", &dray__opening_fields},
    {"answer of OPEN", &dray__welcome_fields},
    {"INSERT", &dray__insert_fields},
    {"ROOM", &dray__room_fields},
    {"SEAL", &dray__sealing_fields},
    {"WAIT", &dray__awaited_fields},
    {"answer of REFILL", &dray__refilling_fields},
    {"ADMIT", &dray__admitting_fields},
    {"COVER, answer of CURSOR", &dray__cover_fields},
    {"RESUME", &dray__cursor_fields},
    {"CLAIM", &dray__claiming_fields},
    {"answer of CLAIM, first", &dray__news_fields},
    {"answer of CLAIM, then", &dray__body_fields},
    {"COMMIT", &dray__committing_fields},
    {"FAIL", &dray__failing_fields},
    {"LOST", &dray__losing_fields},
    {"SPLIT", &dray__splitting_fields},
    {"HOLD", &dray__holding_fields},
    {"CHUNK", &dray__storing_fields},
    {"answer of CHUNK", &dray__stored_fields},
    {"CHECKPOINT", &dray__saving_fields},
    {"PUT", &dray__putting_fields},
    {"answer of PUT", &dray__named_fields},
    {"GET, TAKE", &dray__getting_fields},
    {"answer of GET, of TAKE", &dray__got_fields},
    {"DROP", &dray__dropping_fields},
    {"RESET", &dray__resetting_fields},
    {"KEEPER_JOIN", &dray__keeper_join_fields},
    {"answer of KEEPER_JOIN", &dray__keeper_joined_fields},
    {"KEEPER_FIND; answer of RESUME; RELEASE", &dray__u32_fields},
    {"answer of KEEPER_FIND", &dray__keeper_found_fields},
    {"KEEPER_WAIT", &dray__keeper_wait_fields},
    {"answer of KEEPER_WAIT; KEEPER_DROP", &dray__chunk_keys_fields},
    {"KEEPER_PUT", &dray__keeping_fields},
    {"KEEPER_GET and its answer, KEEPER_RESET; VERSION, DECLINE", &dray__u64_fields},
    {0},
};

static const message data[] = {
    {"a request's header", &dray__data_request_fields},
    {"an answer's header", &dray__answer_fields},
    {"CELLS", &dray__cells_fields},
    {"all others, first", &dray__pull_ticket_fields},
    {"RECTS with a base: of it", &dray__pull_base_fields},
    {"UCX: a message's header", &dray__ucx_header_fields},
    {"UCX: a greeting", &dray__ucx_greeting_fields},
    {"UCX: an offer, first", &dray__ucx_version_fields},
    {0},
};

static const char *const types[] = {"u8",  "bool", "u16", "u32", "i32",  "u64",
                                    "i64", "f64",  "str", "str", "blob", "bool"};

static void say(FILE *out, const dray__fields *of, bool first)
{
    for (const dray__field *f = of->list; f->name; f++, first = false) {
        const char *dot = strrchr(f->name, '.');
        const char *name = dot ? dot + 1 : f->name;
        if (!first)
            fputs(", ", out);
        if (f->kind == DRAY__FIELD_STRUCT_KIND) {
            say(out, f->of, true);
        } else if (f->kind == DRAY__FIELD_LIST_KIND) {
            fprintf(out, "%s n * {", name);
            say(out, f->of, true);
            fputs("}", out);
        } else {
            fprintf(out, "%s %s", types[f->kind], name);
            if (f->kind <= DRAY__FIELD_F64 && f->times > 1)
                fprintf(out, "[%u]", f->times);
            if (f->kind == DRAY__FIELD_GUARD_KIND)
                fputs(", where it is true", out);
        }
    }
}

static void say_all(FILE *out, const char *title, const message *messages)
{
    fprintf(out, "\n| %s | fields |\n| --- | --- |\n", title);
    for (; messages->name; messages++) {
        fprintf(out, "| %s | ", messages->name);
        say(out, messages->fields, true);
        fputs(" |\n", out);
    }
}

static char *list(void)
{
    char *text = NULL;
    size_t size;
    FILE *out = open_memstream(&text, &size);
    assert_non_null(out);
    say_all(out, "message of sessions", sessions);
    say_all(out, "message of hosts that join", hosts);
    say_all(out, "message of weights", weights);
    say_all(out, "message of the queue", queue);
    say_all(out, "between readers and data servers", data);
    fputs("\n| record | fields |\n| --- | --- |\n", out);
    fputs("| the file's head | ", out);
    say(out, &dray__file_head_fields, true);
    fputs(" |\n| every record's header | ", out);
    say(out, &dray__record_fields, true);
    fputs(" |\n", out);
    for (size_t i = 0; i < DRAY__RECORD_KINDS; i++) {
        const dray__record_kind *kind = &dray__record_kinds[i];
        if (!kind->fields && !kind->asked)
            continue;
        fprintf(out, "| %s | ", kind->name);
        if (kind->fields)
            say(out, kind->fields, true);
        if (kind->fields && kind->asked)
            fputs(", ", out);
        if (kind->asked)
            say(out, &dray__asker_fields, true);
        fprintf(out, "%s |\n", kind->bytes ? ", bytes" : "");
    }
    fputs("\n", out);
    assert_int_equal(fclose(out), 0);
    return text;
}

static char *page_of(const char *path)
{
    FILE *in = fopen(path, "r");
    char *text = calloc(1, 1 << 20);
    assert_non_null(in);
    assert_non_null(text);
    assert_true(fread(text, 1, (1 << 20) - 1, in) > 0);
    fclose(in);
    return text;
}

/* Where the list is in the page. */
static char *inside(char *page, char **end)
{
    static const char from[] = "<!-- fields: house_test_wire writes this list -->\n";
    char *begin = strstr(page, from);
    assert_non_null(begin);
    *end = strstr(begin, "<!-- fields end -->");
    assert_non_null(*end);
    return begin + strlen(from);
}

TEST(test_the_page_lists_all_fields)
{
    char path[4096], *end, *expected = list();
    snprintf(path, sizeof path, "%s/docs/wire.md", getenv("DRAY_SOURCE_DIR"));
    char *page = page_of(path), *found = inside(page, &end);
    *end = 0;
    if (strcmp(found, expected) != 0)
        fail_msg("docs/wire.md is not as the tables of fields: house_test_wire docs/wire.md");
    free(page);
    free(expected);
}

/* Frames are written and read without the table, where memory has the order of the wire. */
TEST(test_a_frame_is_as_its_table_says)
{
    const dray__frame frame = {.type = 0x1234,
                               .flags = DRAY__FRAME_ERROR,
                               .id = UINT64_C(0x0102030405060708),
                               .payload = (const uint8_t *)"four",
                               .size = 4};
    dray__writer w = {0}, by_table = {0};
    dray__frame_header header;
    assert_int_equal(dray__frame_put(&w, &frame, NULL), 0);
    dray__reader r = dray__reader_of(w.data, w.size);
    dray__get_fields(&r, NULL, &dray__frame_header_fields, &header);
    assert_false(r.failed);
    assert_int_equal(header.magic, DRAY__FRAME_MAGIC);
    assert_int_equal(header.type, 0x1234);
    assert_int_equal(header.id, UINT64_C(0x0102030405060708));
    assert_int_equal(header.size, 4);
    dray__put_fields(&by_table, &dray__frame_header_fields, &header);
    assert_int_equal(by_table.size, DRAY__FRAME_HEADER);
    assert_memory_equal(by_table.data, w.data, by_table.size);
    dray__writer_free(&by_table);
    dray__writer_free(&w);
}

static int rewrite(const char *path)
{
    char *end, *page = page_of(path), *begin = inside(page, &end), *text = list();
    char *rest = strdup(end);
    FILE *out = fopen(path, "w");
    *begin = 0;
    int bad = !out || !rest || fprintf(out, "%s%s%s", page, text, rest) < 0 || fclose(out) != 0;
    free(rest);
    free(page);
    free(text);
    return bad;
}

int main(int argc, char **argv)
{
    if (argc > 1)
        return rewrite(argv[1]);
    return suite_run(NULL, NULL);
}
