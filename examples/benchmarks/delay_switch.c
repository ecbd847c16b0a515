/*
 * delay_switch PORTS DELAY_US: an Ethernet switch in user space that every frame takes DELAY_US to pass.
 *
 * For kernels without netem. It makes the TAP devices port0, port1, ... in the network namespace it is started in,
 * prints "ready" and forwards frames until it is killed; the devices go with it. Device number i is meant to be moved
 * to a host of its own and to be given an Ethernet address that ends in i: that is how a frame's port is known.
 *
 * - The delay is the same for all frames, so they leave in the order in which they came, and the queue is a ring.
 * - Frames carry a virtio header and devices accept segmentation offload, so the kernel hands over up to 64 KB of a TCP
 *   stream at once, and 1 Gbit/s takes a small part of a core.
 * - Rates are not its business: hosts shape what they send.
 */
#define _GNU_SOURCE
#include <fcntl.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <time.h>
#include <unistd.h>

#include <linux/if.h>
#include <linux/if_ether.h>
#include <linux/if_tun.h>
#include <linux/virtio_net.h>

enum {
    MAX_PORTS = 64,
    QUEUE_LENGTH = 1 << 16,  /* frames; 10 Gbit/s of full-sized frames for 78 ms */
    FRAMES_PER_TURN = 16,    /* read from one port before the others and the queue get their turn */
    MAX_FRAME = 70000,       /* 64 KB of segmented TCP and the headers */
};

struct frame {
    long due;    /* nanoseconds on the monotonic clock */
    int source;  /* port it came from */
    int length;
    unsigned char *bytes;  /* a virtio header, then the Ethernet frame */
};

static struct frame queue[QUEUE_LENGTH];
static unsigned oldest, next_free;  /* count on for ever; modulo QUEUE_LENGTH they are places in the ring */
static struct pollfd ports[MAX_PORTS];
static int port_count;

static void fail(const char *what)
{
    perror(what);
    exit(1);
}

static long now(void)
{
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return time.tv_sec * 1000000000L + time.tv_nsec;
}

static int open_port(int number)
{
    struct ifreq request = {.ifr_flags = IFF_TAP | IFF_NO_PI | IFF_VNET_HDR};
    int descriptor = open("/dev/net/tun", O_RDWR | O_NONBLOCK);
    if (descriptor < 0)
        fail("/dev/net/tun");
    snprintf(request.ifr_name, sizeof request.ifr_name, "port%d", number);
    if (ioctl(descriptor, TUNSETIFF, &request) < 0)
        fail("TUNSETIFF");
    if (ioctl(descriptor, TUNSETOFFLOAD, TUN_F_CSUM | TUN_F_TSO4 | TUN_F_TSO6) < 0)
        fail("TUNSETOFFLOAD");
    return descriptor;
}

/* A frame that a port does not accept is lost, as on a real switch; TCP sends it again. */
static void deliver(const struct frame *frame)
{
    const unsigned char *destination = frame->bytes + sizeof(struct virtio_net_hdr);
    int is_for_all = destination[0] & 1;
    for (int port = 0; port < port_count; port++)
        if (port != frame->source && (is_for_all || destination[ETH_ALEN - 1] == port)) {
            ssize_t written = write(ports[port].fd, frame->bytes, frame->length);
            (void)written;
        }
    free(frame->bytes);
}

static void deliver_due(void)
{
    for (long time = now(); oldest != next_free && queue[oldest % QUEUE_LENGTH].due <= time; oldest++)
        deliver(&queue[oldest % QUEUE_LENGTH]);
}

static void take_from(int port, long delay)
{
    static unsigned char buffer[MAX_FRAME];
    for (int turn = 0; turn < FRAMES_PER_TURN && next_free - oldest < QUEUE_LENGTH; turn++) {
        ssize_t length = read(ports[port].fd, buffer, sizeof buffer);
        if (length <= 0)
            return;
        unsigned char *bytes = malloc(length);
        if (!bytes)
            fail("malloc");
        memcpy(bytes, buffer, length);
        queue[next_free++ % QUEUE_LENGTH] = (struct frame){now() + delay, port, length, bytes};
    }
}

/* Sleep until a frame comes in or the oldest is due. */
static void wait_for_work(void)
{
    long left = oldest == next_free ? 1000000000L : queue[oldest % QUEUE_LENGTH].due - now();
    if (left < 0)
        left = 0;
    struct timespec limit = {left / 1000000000L, left % 1000000000L};
    if (ppoll(ports, port_count, &limit, NULL) < 0)
        fail("ppoll");
}

int main(int argument_count, char **arguments)
{
    if (argument_count != 3 || (port_count = atoi(arguments[1])) < 1 || port_count > MAX_PORTS) {
        fprintf(stderr, "usage: %s PORTS DELAY_US   (1 <= PORTS <= %d)\n", arguments[0], MAX_PORTS);
        return 2;
    }
    long delay = atol(arguments[2]) * 1000L;
    prctl(PR_SET_TIMERSLACK, 1);              /* the default, 50 us, would be half of a LAN's delay */
    setpriority(PRIO_PROCESS, 0, -20);        /* a switch does not wait until the hosts' processors are idle */
    for (int port = 0; port < port_count; port++)
        ports[port] = (struct pollfd){.fd = open_port(port), .events = POLLIN};
    puts("ready");
    fflush(stdout);
    for (;;) {
        wait_for_work();
        deliver_due();
        for (int port = 0; port < port_count; port++)
            if (ports[port].revents & POLLIN)
                take_from(port, delay);
    }
}
