/* A conversation with a gpt-oss model: what it thinks and what it answers are
 * printed as they come, each behind the name of its channel.
 *
 *     chat MODEL [-s INSTRUCTIONS] [-n MAX_TOKENS] [MESSAGE...]
 *     chat MODEL [-n MAX_TOKENS] -f FILE
 *
 * MODEL: a directory with a tokenizer.json. Each MESSAGE is the user's next one,
 * answered before the next is read; without any, each line of standard input is.
 * FILE: JSON, as getp_harmony_render takes it: a list of messages, or the body of
 * a request for chat completions. It is answered once; with continue_final_message
 * the answer goes on with the last message.
 *
 * The library prints on stderr why a call failed. */

#include "getp.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

struct chat {
    getp_model *model;
    getp_tokenizer *tokenizer;
    getp_batch *batch;
    size_t max_tokens;
};

/* JSON text that grows; NULL once there is no memory for it. */
struct text {
    char *bytes;
    size_t length, room;
};

static void append(struct text *text, const char *bytes, size_t length) {
    if (text->length + length >= text->room) {
        const size_t room = 2 * (text->length + length) + 256;
        const int has_failed = text->bytes == NULL && text->room > 0;
        char *grown = has_failed ? NULL : (char *)realloc(text->bytes, room);
        if (grown == NULL) free(text->bytes);
        text->bytes = grown;
        text->room = room;
    }
    if (text->bytes != NULL) {
        memcpy(text->bytes + text->length, bytes, length);
        text->bytes[text->length + length] = '\0';
    }
    text->length += length;
}

/* A message of `role`, behind the others of the list. */
static void append_message(struct text *list, const char *role, const char *content) {
    char escaped[8];

    append(list, list->length == 1 ? "" : ",", list->length == 1 ? 0 : 1);
    append(list, "{\"role\":\"", 9);
    append(list, role, strlen(role));
    append(list, "\",\"content\":\"", 13);
    for (; *content != '\0'; content++) {
        const unsigned char byte = (unsigned char)*content;
        if (byte >= ' ' && byte != '"' && byte != '\\') {
            append(list, content, 1);
        } else {
            append(list, escaped, (size_t)snprintf(escaped, sizeof escaped, "\\u%04x", byte));
        }
    }
    append(list, "\"}", 2);
}

static const char *end_of_string(const char *at) {
    while (*at != '"') at += *at == '\\' ? 2 : 1;
    return at;
}

/* The library escapes quotes, backslashes and control characters, nothing else. */
static void print_string(const char *at, const char *end) {
    static const char letters[] = "bfnrt", bytes[] = "\b\f\n\r\t";

    for (; at < end; at++) {
        const char *letter;
        char code[5] = "";
        if (*at != '\\') {
            putchar(*at);
        } else if (*++at == 'u') {
            memcpy(code, at + 1, 4);
            putchar((int)strtol(code, NULL, 16));
            at += 4;
        } else {
            letter = strchr(letters, *at);
            putchar(letter != NULL ? bytes[letter - letters] : *at);
        }
    }
}

/* Prints pieces of an answer's messages, and where a message begins its channel and whom it is for:
 * `json` is a list of flat objects. `*message` is the number of the message that was printed last.
 */
static void print_pieces(const char *json, long *message) {
    const char *at = json;

    while ((at = strchr(at, '{')) != NULL) {
        const char *strings[3][2] = {{NULL, NULL}, {NULL, NULL}, {NULL, NULL}};
        static const char *const names[] = {"channel", "recipient", "content"};
        long number = 0;

        while (*at != '}') {
            const char *name = at + 2;
            at = end_of_string(name) + 2;
            if (*at != '"') {
                char *end;
                number = strtol(at, &end, 10);
                at = end;
                continue;
            }
            for (int i = 0; i < 3; i++) {
                if (strncmp(name, names[i], strlen(names[i])) == 0) {
                    strings[i][0] = at + 1;
                    strings[i][1] = end_of_string(at + 1);
                }
            }
            at = end_of_string(at + 1) + 1;
        }
        if (number != *message) {
            fputs(*message < 0 ? "[" : "\n[", stdout);
            if (strings[0][0] == NULL) {
                fputs("final", stdout); /* a message without a channel */
            } else {
                print_string(strings[0][0], strings[0][1]);
            }
            if (strings[1][0] != NULL) {
                fputs(" to ", stdout);
                print_string(strings[1][0], strings[1][1]);
            }
            fputs("] ", stdout);
            *message = number;
        }
        print_string(strings[2][0], strings[2][1]);
    }
    fflush(stdout);
}

static getp_status submit(const struct chat *chat, const getp_tokens *prompt) {
    getp_request request;

    getp_request_init(&request);
    request.prompt = prompt->ids;
    request.prompt_length = prompt->count;
    request.max_tokens = chat->max_tokens;
    request.tokens_per_event = 1;
    return getp_batch_submit(chat->batch, &request, NULL);
}

/* Prints the answer while it comes; gives what it says, NULL on failure. */
static const getp_text *receive(const struct chat *chat, getp_harmony_reader *reader) {
    long message = -1;
    int end = GETP_END_NONE;
    const getp_text *pieces;

    while (end == GETP_END_NONE) {
        const getp_event *event;
        if (getp_batch_next(chat->batch, -1.0, &event) != GETP_OK) return NULL;
        end = event->end;
        if (event->why != NULL) fprintf(stderr, "chat: %s\n", event->why);
        pieces = getp_harmony_reader_next(reader, event->tokens, event->count);
        getp_event_free(event);
        if (pieces == NULL) return NULL;
        print_pieces(pieces->bytes, &message);
        getp_text_free(pieces);
    }
    if ((pieces = getp_harmony_reader_finish(reader)) == NULL) return NULL;
    print_pieces(pieces->bytes, &message);
    getp_text_free(pieces);
    putchar('\n');
    fflush(stdout);
    return end == GETP_END_REFUSED || end == GETP_END_FAILED ? NULL
                                                             : getp_harmony_reader_end(reader);
}

/* Answers a conversation; what it says is for getp_text_free. */
static const getp_text *answer(const struct chat *chat, const struct text *json) {
    const getp_text *said = NULL;
    const getp_tokens *prompt;
    getp_harmony_reader *reader = NULL;

    if (json->bytes == NULL) {
        fputs("chat: there is no memory for the conversation\n", stderr);
        return NULL;
    }
    if ((prompt = getp_harmony_render(chat->tokenizer, json->bytes, json->length)) != NULL &&
        (reader = getp_harmony_reader_open_for(chat->tokenizer, json->bytes, json->length)) !=
            NULL &&
        submit(chat, prompt) == GETP_OK) {
        said = receive(chat, reader);
    }
    getp_harmony_reader_close(reader);
    getp_tokens_free(prompt);
    return said;
}

/* The user's next message is answered, and the answer's message is part of the conversation from
 * then on. */
static int turn(const struct chat *chat, struct text *list, const char *message) {
    const getp_text *said;
    const char *begin, *end;

    append_message(list, "user", message);
    append(list, "]", 1);
    if ((said = answer(chat, list)) == NULL) return 0;
    list->length--;
    /* {"message":{...},"finish_reason":... No text holds a quote without a backslash before it. */
    begin = said->bytes + strlen("{\"message\":");
    end = strstr(begin, ",\"finish_reason\":");
    append(list, ",", 1);
    append(list, begin, (size_t)(end - begin));
    getp_text_free(said);
    return 1;
}

static int converse(const struct chat *chat, const char *instructions, char **messages) {
    struct text list = {NULL, 0, 0};
    char line[8192];
    int works = 1;

    append(&list, "[", 1);
    if (instructions != NULL) append_message(&list, "developer", instructions);
    if (*messages != NULL) {
        for (; works && *messages != NULL; messages++) works = turn(chat, &list, *messages);
    } else {
        while (works && fgets(line, sizeof line, stdin) != NULL) {
            line[strcspn(line, "\r\n")] = '\0';
            works = turn(chat, &list, line);
        }
    }
    free(list.bytes);
    return works;
}

static int answer_file(const struct chat *chat, const char *path) {
    struct text json = {NULL, 0, 0};
    const getp_text *said = NULL;
    char buffer[8192];
    size_t length;
    FILE *file = fopen(path, "rb");

    if (file == NULL) {
        perror(path);
        return 0;
    }
    while ((length = fread(buffer, 1, sizeof buffer, file)) > 0) append(&json, buffer, length);
    if (ferror(file)) {
        perror(path);
    } else {
        said = answer(chat, &json);
    }
    fclose(file);
    free(json.bytes);
    getp_text_free(said);
    return said != NULL;
}

int main(int argc, char **argv) {
    struct chat chat = {NULL, NULL, NULL, 512};
    const char *instructions = NULL, *file = NULL;
    int at = 2, works = 0;

    for (; at + 1 < argc && argv[at][0] == '-' && argv[at][1] != '\0' &&
           strchr("snf", argv[at][1]) != NULL;
         at += 2) {
        if (argv[at][1] == 's') instructions = argv[at + 1];
        if (argv[at][1] == 'n') chat.max_tokens = strtoul(argv[at + 1], NULL, 10);
        if (argv[at][1] == 'f') file = argv[at + 1];
    }
    if (argc < 2 || (file != NULL && (instructions != NULL || at < argc))) {
        fputs(
            "usage: chat MODEL [-s INSTRUCTIONS] [-n MAX_TOKENS] [MESSAGE...]\n"
            "       chat MODEL [-n MAX_TOKENS] -f FILE\n",
            stderr);
        return 2;
    }
    if ((chat.tokenizer = getp_tokenizer_open(argv[1])) != NULL &&
        (chat.model = getp_model_open(argv[1], NULL)) != NULL) {
        getp_batch_options options;
        getp_batch_options_init(&options);
        options.tokenizer = chat.tokenizer; /* ids without a token are never sampled */
        if ((chat.batch = getp_batch_open(chat.model, &options)) != NULL) {
            works =
                file != NULL ? answer_file(&chat, file) : converse(&chat, instructions, argv + at);
        }
    }
    /* The close functions accept NULL. */
    getp_batch_close(chat.batch);
    getp_model_close(chat.model);
    getp_tokenizer_close(chat.tokenizer);
    return works ? EXIT_SUCCESS : EXIT_FAILURE;
}
