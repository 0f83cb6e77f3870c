/* Tests the names that come over a connection. No path names a file on the coordinator's disk. A
 * control character in a name is refused in every message and at every place, because names are
 * written into files of lines, logs and terminals. */
#include "control/fixture.h"
#include "suite.h"

#include "control/channel.h"
#include "control/reports.h"
#include "queue/client/client.h"
#include "queue/server/controller.h"
#include "weights/registry/registry.h"

#include <dray/model.h>

static coordinator_fixture f;
static dray_context *context;
static dray_queue *queue;

static int add_services(dray__coordinator *coordinator, dray_error *error)
{
    char folder[128];
    snprintf(folder, sizeof folder, "%s/journals", f.folder);
    int rc = dray__registry_add(coordinator, error);
    return rc ? rc : dray__queue_add(coordinator, f.base, NULL, folder, NULL, error);
}

FIXTURE(start)
{
    dray_error error;
    f.tcp = true;
    fixture_start(&f, add_services);
    context = fixture_open(&f, "names", "trainer", 0);
    const dray_queue_task task = {.name = "train"};
    dray_queue_options options = DRAY_QUEUE_OPTIONS_INIT;
    options.tasks = &task;
    options.task_count = 1;
    options.backend = DRAY_BACKEND_BUILTIN;
    if (dray_queue_open(context, "q", &options, &queue, &error))
        fixture_die("queue", &error);
    return 0;
}

FIXTURE(stop)
{
    char command[160];
    dray_queue_close(queue);
    dray_close(context);
    snprintf(command, sizeof command, "rm -rf %s/journals", f.folder);
    assert_int_equal(system(command), 0);
    fixture_stop(&f);
    return 0;
}

/* Where names stand in messages. h: a queue's head; N: the name; s: another one; 0 and 1: u32;
 * v: u32, the protocol's version; 8: u64 0; b and B: u8 0 and 1. Zeros follow. */
static const struct {
    uint16_t type;
    const char *fields;
} places[] = {
    {DRAY__MSG_HELLO, "vvN"},
    {DRAY__MSG_HELLO, "vvsN"},
    {DRAY__MSG_RETURN, "vvN"},
    {DRAY__MSG_RETURN, "vvsN"},
    {DRAY__MSG_BARRIER, "N"},
    {DRAY__MSG_REPORT_POST, "N"},
    {DRAY__MSG_REPORT_WATCH, "N"},
    {DRAY__MSG_PUBLISHER_OPEN, "N"},
    {DRAY__MSG_PUBLISHER_OPEN, "s118N"},
    {DRAY__MSG_SUBSCRIBER_OPEN, "N"},
    {DRAY__MSG_SUBSCRIBER_OPEN, "sN"},
    {DRAY__MSG_SUBSCRIBER_OPEN, "ss118N"},
    {DRAY__MSG_UPDATE_BEGIN, "8b8N"},
    {DRAY__MSG_CHECKSUMS_GET, "N"},
    {DRAY__MSG_CHECKSUMS_GET, "sN"},
    {DRAY__MSG_QUEUE_OPEN, "N"},
    {DRAY__MSG_QUEUE_OPEN, "s1N"},
    {DRAY__MSG_QUEUE_OPEN, "s1s1N"},
    {DRAY__MSG_QUEUE_OPEN, "s1s01N"},
    {DRAY__MSG_QUEUE_OPEN, "s0880080008"
                           "00N"},
    {DRAY__MSG_QUEUE_OPEN, "s0880080008"
                           "00s8N"},
    {DRAY__MSG_QUEUE_INSERT, "hN"},
    {DRAY__MSG_QUEUE_INSERT, "hs11b888081N"},
    {DRAY__MSG_QUEUE_INSERT, "hs11b8880801N"},
    {DRAY__MSG_QUEUE_ROOM, "hN"},
    {DRAY__MSG_QUEUE_SEAL, "hN"},
    {DRAY__MSG_QUEUE_CLEAR, "hN"},
    {DRAY__MSG_QUEUE_WAIT, "hN"},
    {DRAY__MSG_QUEUE_CLAIM, "h000810N"},
    {DRAY__MSG_QUEUE_CLAIM, "h000810s1b08008BN"},
    {DRAY__MSG_QUEUE_CLAIM, "h000810s1b08008BsN"},
    {DRAY__MSG_QUEUE_COMMIT, "h001N"},
    {DRAY__MSG_QUEUE_COMMIT, "h0001N"},
    {DRAY__MSG_QUEUE_NEXT, "h001N"},
    {DRAY__MSG_QUEUE_NEXT, "h0001N"},
    {DRAY__MSG_QUEUE_CHECKPOINT, "hN"},
    {DRAY__MSG_QUEUE_KEEPER_JOIN, "N"},
    {DRAY__MSG_QUEUE_KEEPER_JOIN, "sN"},
};

static void put(dray__writer *w, char field, const char *name)
{
    if (field == 'N' || field == 's')
        dray__put_string(w, field == 'N' ? name : "x");
    else if (field == '0' || field == '1')
        dray__put_u32(w, (uint32_t)(field - '0'));
    else if (field == 'v')
        dray__put_u32(w, DRAY__PROTOCOL_VERSION);
    else if (field == '8')
        dray__put_u64(w, 0);
    else if (field == 'b' || field == 'B')
        dray__put_u8(w, field == 'B');
    else
        fail_msg("field '%c'", field);
}

/* The error that the coordinator answers with. */
static void send_with(size_t place, const char *name, dray_error *error)
{
    static const uint8_t zeros[256];
    const char *fields = places[place].fields;
    uint16_t type = places[place].type;
    bool greets = type == DRAY__MSG_HELLO || type == DRAY__MSG_RETURN;
    dray__writer w = {0}, *head = *fields == 'h' ? dray__queue_begin(queue) : NULL;
    dray__channel *channel = NULL;
    *error = (dray_error){0};
    if (head)
        dray__put_bytes(&w, head->data, head->size);
    for (fields += head != NULL; *fields; fields++)
        put(&w, *fields, name);
    dray__put_bytes(&w, zeros, sizeof zeros);
    int64_t deadline = dray__deadline(20 * DRAY__SECOND);
    if (!head)
        assert_int_equal(greets ? dray__channel_connect(f.unix_address, deadline, &channel, NULL)
                                : dray__channel_open(context, &channel, NULL),
                         DRAY_OK);
    dray__reply reply;
    int rc =
        dray__call(head ? queue->channel : channel, type, &w, NULL, 0, deadline, &reply, error);
    assert_true(rc != DRAY_OK && rc != DRAY_ECLOSED && rc != DRAY_ETIMEDOUT);
    dray__channel_close(channel);
    dray__writer_free(&w);
}

TEST(no_name_has_control_characters)
{
    static const char *const bad[] = {"a\nssh-rsa AAAA evil", "\x1b[2J", "tab\there", "del\x7f",
                                      "next line \xc2\x85"};
    dray_error error;
    int failed = 0;
    for (size_t i = 0; i < sizeof places / sizeof *places; i++) {
        for (size_t n = 0; n < sizeof bad / sizeof *bad; n++) {
            send_with(i, bad[n], &error);
            if (error.code == DRAY_EFORMAT && strstr(error.message, "control character"))
                continue;
            fprintf(stderr, "%s \"%s\", name %zu: %s\n", dray__message_name(places[i].type),
                    places[i].fields, n, error.message);
            failed++;
            break;
        }
        send_with(i,
                  "gr\xc3\xb6\xc3\x9f"
                  "e \xe2\x82\xac",
                  &error); /* a name like others */
        if (strstr(error.message, "control character"))
            fail_msg("%s: %s", dray__message_name(places[i].type), error.message);
    }
    assert_int_equal(failed, 0);
}

/* The caller hears it before anything is sent. */
TEST(the_library_refuses_them_too)
{
    dray_error error;
    assert_int_equal(dray_queue_seal(queue, "a\nb", 1, &error), DRAY_EINVALID);
    assert_non_null(strstr(error.message, "control character"));
    const int64_t shape = 4;
    dray_layout *layout;
    uint32_t tensor;
    assert_int_equal(dray_layout_new(&layout, NULL), DRAY_OK);
    assert_int_equal(
        dray_layout_add_tensor(layout, "a\x1b[2J", DRAY_F32, 1, &shape, &tensor, &error),
        DRAY_EINVALID);
    dray_layout_free(layout);
}

/* A file of another host is none of the coordinator's; a name is of its own folder. */
TEST(nobody_names_a_path_over_tcp)
{
    dray_error error;
    char path[128], saved[160];
    dray_context *far = fixture_open_at(f.tcp_address, "far", "task", 0);
    dray_queue *saving, *restored;
    const dray_queue_task task = {.name = "train"};
    dray_queue_options options = DRAY_QUEUE_OPTIONS_INIT;
    options.tasks = &task;
    options.task_count = 1;
    options.backend = DRAY_BACKEND_BUILTIN;
    options.durability = DRAY_DURABILITY_CHECKPOINT;
    assert_int_equal(dray_queue_open(far, "saving", &options, &saving, &error), DRAY_OK);
    snprintf(path, sizeof path, "%s/step", f.folder);
    assert_int_equal(dray_queue_checkpoint(saving, path, &error), DRAY_EUNSUPPORTED);
    assert_non_null(strstr(error.message, "over TCP"));
    assert_int_equal(access(path, F_OK), -1);
    assert_int_equal(dray_queue_checkpoint(saving, "step", &error), DRAY_OK);
    snprintf(saved, sizeof saved, "%s/journals/checkpoint-step", f.folder);
    assert_int_equal(access(saved, F_OK), 0);
    options.restore = saved;
    assert_int_equal(dray_queue_open(far, "other", &options, &restored, &error), DRAY_EUNSUPPORTED);
    options.restore = "step";
    assert_int_equal(dray_queue_open(far, "other", &options, &restored, &error), DRAY_EINVALID);
    assert_non_null(strstr(error.message, "it is of queue saving, not other"));
    dray_queue_close(saving);
    dray_close(far);
}

SUITE(start, stop)
