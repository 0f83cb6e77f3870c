/* Tests a joined host's link to its run (run/join/uplink.h), with a run that refuses a pulse or
 * ends the host's session. The host's messages are sent again, under the same numbers. */
#include "control/fixture.h"
#include "suite.h"

#include "base/json.h"
#include "control/channel.h"
#include "control/relay.h"
#include "run/join/uplink.h"

#include <fcntl.h>
#include <stdatomic.h>
#include <sys/stat.h>

enum { TOLD = 16 };

static coordinator_fixture f;
static char folder[128], token[144];

/* The run: a thread that answers what hosts ask. */
static struct run {
    pthread_t thread;
    atomic_bool over;
    atomic_int refusal;              /* the code of the next pulse that tells something; 0: none */
    atomic_int count, numbers[TOLD]; /* of the events that were told, in order */
    char texts[TOLD][32];
} r;

static int take_pulse(const dray__host_ask *ask)
{
    size_t i;
    json_t *one, *pulse = NULL;
    if (dray__json_parse(ask->json, ask->json_size, "a pulse", &pulse, NULL))
        return DRAY_EFORMAT;
    const json_t *said = json_object_get(pulse, "say");
    int code = json_array_size(said) ? atomic_exchange(&r.refusal, 0) : 0;
    json_array_foreach(said, i, one)
    {
        int at = r.count;
        if (at == TOLD)
            continue;
        r.numbers[at] = (int)dray__json_integer(one, "number");
        snprintf(r.texts[at], sizeof r.texts[at], "%s", dray__json_string(one, "text"));
        r.count = at + 1;
    }
    json_decref(pulse);
    return code;
}

static void *answer_all(void *user)
{
    (void)user;
    static const char joined[] = "{\"id\":\"x\",\"epoch\":1,\"places\":[],\"name\":\"h\"}";
    dray_context *context = fixture_open(&f, "run", "task", 0);
    dray__channel *channel;
    dray__host_answer answers[TOLD];
    uint32_t count = 0;
    if (dray__channel_open(context, &channel, NULL))
        abort();
    while (!r.over || count) {
        dray__arena texts = {0};
        dray__host_asks asks = {0};
        const dray__host_next next = {50 * DRAY__MILLISECOND, answers, count};
        if (dray__ask(channel, DRAY__MSG_HOST_NEXT, &dray__host_next_fields, &next,
                      dray__deadline(20 * DRAY__SECOND), &texts, &dray__host_asks_fields, &asks,
                      NULL))
            abort();
        count = 0;
        for (uint32_t i = 0; i < asks.count && i < TOLD; i++) {
            const dray__host_ask *ask = &asks.items[i].ask;
            int code = strcmp(ask->what, "pulse") == 0 ? take_pulse(ask) : 0;
            const char *json = strcmp(ask->what, "join") == 0 ? joined : "{}";
            if (asks.items[i].number)
                answers[count++] = (dray__host_answer){.number = asks.items[i].number,
                                                       .code = code,
                                                       .message = code ? "not now" : "",
                                                       .json = json,
                                                       .json_size = strlen(json)};
        }
        dray__arena_free(&texts);
    }
    dray__channel_close(channel);
    dray_close(context);
    return NULL;
}

FIXTURE(start)
{
    f.tcp = true;
    fixture_start(&f, dray__relay_add);
    dray__token master = fixture_master(&f);
    snprintf(folder, sizeof folder, "%s/host", f.folder);
    snprintf(token, sizeof token, "%s/token", folder);
    char path[144];
    mkdir(folder, 0700);
    snprintf(path, sizeof path, "%s/logs", folder);
    mkdir(path, 0700);
    snprintf(path, sizeof path, "%s/trace", folder);
    mkdir(path, 0700);
    if (dray__token_write(token, &master, NULL))
        return -1;
    return pthread_create(&r.thread, NULL, answer_all, NULL);
}

FIXTURE(stop)
{
    char path[144];
    r.over = true;
    pthread_join(r.thread, NULL);
    unlink(token);
    snprintf(path, sizeof path, "%s/logs", folder);
    rmdir(path);
    snprintf(path, sizeof path, "%s/trace", folder);
    rmdir(path);
    rmdir(folder);
    fixture_stop(&f);
    return 0;
}

static void say(const char *event, const char *text)
{
    (void)event, (void)text;
}

static void wait_for(int count)
{
    for (int i = 0; i < 4000 && r.count < count; i++)
        usleep(5000);
    assert_true(r.count >= count);
}

static void expect(int at, int number, const char *text)
{
    assert_int_equal(r.numbers[at], number);
    assert_string_equal(r.texts[at], text);
}

static dray__uplink *joined(json_t *roles)
{
    dray_error error;
    dray__uplink *link = NULL;
    const json_t *told;
    const char *const tokens[] = {token};
    const dray__uplink_options o = {.text = "",
                                    .address = f.tcp_address,
                                    .name = "h",
                                    .tokens = tokens,
                                    .token_count = 1,
                                    .roles = roles,
                                    .folder = folder,
                                    .say = say,
                                    .wait_ns = 20 * DRAY__SECOND};
    r.count = 0;
    assert_int_equal(dray__uplink_open(&o, &link, &error), DRAY_OK);
    assert_int_equal(dray__uplink_join(link, &told, &error), DRAY_OK);
    return link;
}

TEST(a_folder_that_cannot_be_read_for_a_while_loses_no_host)
{
    char logs[144], away[144];
    dray_error error;
    dray__uplink_sight sight;
    json_t *roles = json_object();
    snprintf(logs, sizeof logs, "%s/logs", folder);
    snprintf(away, sizeof away, "%s/away", folder);
    dray__uplink *link = joined(roles);
    assert_int_equal(rename(logs, away), 0);
    assert_int_equal(dray__uplink_begin(link, &error), DRAY_OK);
    wait_for(1); /* the run hears of it once */
    dray__uplink_say(link, "restart", "one");
    wait_for(2);
    assert_int_equal(rename(away, logs), 0);
    dray__uplink_say(link, "restart", "two");
    wait_for(3);
    dray__uplink_look(link, &sight);
    assert_false(sight.lost);
    dray__uplink_leave(link, NULL, dray__deadline(10 * DRAY__SECOND));
    dray__uplink_close(link);
    json_decref(roles);
    assert_non_null(strstr(r.texts[0], "/"));
    expect(1, 2, "one");
    expect(2, 3, "two");
    assert_int_equal(r.count, 3);
}

TEST(what_was_not_taken_is_told_again)
{
    dray_error error;
    dray__uplink_sight sight;
    const json_t *told;
    json_t *roles = json_object();
    dray__uplink *link = joined(roles);
    r.refusal = DRAY_EAGAIN;
    dray__uplink_say(link, "restart", "one");
    assert_int_equal(dray__uplink_begin(link, &error), DRAY_OK);
    wait_for(2);
    r.refusal = DRAY_ESTALE; /* as when the run has no such host any more: its session ends */
    dray__uplink_say(link, "restart", "two");
    wait_for(3);
    for (int i = 0; i < 4000; i++) {
        dray__uplink_look(link, &sight);
        if (sight.lost)
            break;
        usleep(5000);
    }
    assert_true(sight.lost);
    dray__uplink_end(link);
    assert_int_equal(dray__uplink_join(link, &told, &error), DRAY_OK);
    dray__uplink_say(link, "restart", "three");
    assert_int_equal(dray__uplink_begin(link, &error), DRAY_OK);
    wait_for(5);
    dray__uplink_leave(link, NULL, dray__deadline(10 * DRAY__SECOND));
    dray__uplink_close(link);
    json_decref(roles);
    expect(0, 1, "one");
    expect(1, 1, "one");
    expect(2, 2, "two");
    expect(3, 2, "two");
    expect(4, 3, "three");
    assert_int_equal(r.count, 5); /* and nothing that was taken */
}

SUITE(start, stop)
