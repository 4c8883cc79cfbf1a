package main

import (
	"bytes"
	"fmt"
	"io"
	"net/netip"
	"runtime"
	"runtime/debug"
	"slices"
	"strconv"
	"time"

	"golang.org/x/sys/unix"

	"github.com/edgelimit/caddy-edgelimit/bench/internal/process"
)

// load is what is sent to a server: over some connections, each with one request
// at a time, as fast as answers come.
type load struct {
	address     netip.AddrPort
	connections int
	status      string        // that all answers must have, but for one in a thousand
	request     func() []byte // the next request; what it returns is sent at once
	requests    int           // 0: for as long as duration says
	duration    time.Duration
}

// loadResult is what came of it.
type loadResult struct {
	requests  int
	elapsed   time.Duration
	latencies []time.Duration // sorted
}

func (r *loadResult) perSecond() float64 { return float64(r.requests) / r.elapsed.Seconds() }

func (r *loadResult) percentile(p float64) time.Duration {
	return r.latencies[min(int(p*float64(len(r.latencies))), len(r.latencies)-1)]
}

func (r *loadResult) worst() time.Duration { return r.latencies[len(r.latencies)-1] }

// generator sends loads from a thread of its own on one core. It waits for its
// sockets itself (epoll): what Go's scheduler would do for so many goroutines
// costs more than the server under test takes to answer.
type generator struct {
	cpu         int
	connections []connection
	epoll       int
	latencies   []time.Duration
}

type connection struct {
	fd     int
	sentAt time.Time
	buffer [4096]byte
	filled int
}

// mostSilence is how long no server may leave all requests without an answer.
const mostSilence = 10 * time.Second

// run sends a load.
func (g *generator) run(l load) (*loadResult, error) {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	restore, err := process.PinThread(g.cpu)
	if err != nil {
		return nil, err
	}
	defer restore()
	runtime.GC()
	defer debug.SetGCPercent(debug.SetGCPercent(-1)) // no collection of ours may delay the server's answers

	if err := g.connect(l); err != nil {
		return nil, err
	}
	defer g.disconnect()
	g.latencies = g.latencies[:0]
	if need := max(l.requests, int(l.duration.Seconds()*200_000)); cap(g.latencies) < need {
		g.latencies = make([]time.Duration, 0, need)
	}

	start := time.Now()
	sent := 0
	for i := range g.connections {
		if err := g.send(&g.connections[i], l.request()); err != nil {
			return nil, err
		}
		sent++
	}
	var elapsed time.Duration
	others := 0 // such as the one request a minute that nginx allows at least
	events := make([]unix.EpollEvent, l.connections)
	for waiting := sent; waiting > 0; {
		n, err := unix.EpollWait(g.epoll, events, int(mostSilence.Milliseconds()))
		if err == unix.EINTR {
			continue
		}
		if err != nil {
			return nil, fmt.Errorf("waiting for answers: %w", err)
		}
		if n == 0 {
			return nil, fmt.Errorf("no answer in %s", mostSilence)
		}
		for _, event := range events[:n] {
			c := &g.connections[event.Fd]
			status, err := c.receive()
			if err != nil {
				return nil, err
			}
			if status == "" {
				continue
			}
			if status != l.status {
				others++
			}
			now := time.Now()
			g.latencies = append(g.latencies, now.Sub(c.sentAt))
			elapsed = now.Sub(start)
			if l.requests > 0 && sent >= l.requests || l.requests == 0 && elapsed >= l.duration {
				waiting--
				continue
			}
			if err := g.send(c, l.request()); err != nil {
				return nil, err
			}
			sent++
		}
	}
	if others > 1+len(g.latencies)/1000 {
		return nil, fmt.Errorf("%d of %d answers are not %s", others, len(g.latencies), l.status)
	}
	slices.Sort(g.latencies)
	return &loadResult{len(g.latencies), elapsed, slices.Clone(g.latencies)}, nil
}

func (g *generator) connect(l load) (err error) {
	if g.epoll, err = unix.EpollCreate1(unix.EPOLL_CLOEXEC); err != nil {
		return fmt.Errorf("making an epoll: %w", err)
	}
	g.connections = make([]connection, l.connections)
	for i := range g.connections {
		c := &g.connections[i]
		if c.fd, err = unix.Socket(unix.AF_INET, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0); err != nil {
			return fmt.Errorf("making a socket: %w", err)
		}
		to := &unix.SockaddrInet4{Port: int(l.address.Port()), Addr: l.address.Addr().As4()}
		if err = unix.Connect(c.fd, to); err != nil {
			return fmt.Errorf("connecting to %s: %w", l.address, err)
		}
		if err = unix.SetsockoptInt(c.fd, unix.IPPROTO_TCP, unix.TCP_NODELAY, 1); err != nil {
			return fmt.Errorf("setting TCP_NODELAY: %w", err)
		}
		if err = unix.SetNonblock(c.fd, true); err != nil {
			return fmt.Errorf("making a socket not block: %w", err)
		}
		event := unix.EpollEvent{Events: unix.EPOLLIN, Fd: int32(i)} // its place, not its number
		if err = unix.EpollCtl(g.epoll, unix.EPOLL_CTL_ADD, c.fd, &event); err != nil {
			return fmt.Errorf("adding a socket to the epoll: %w", err)
		}
	}
	return nil
}

func (g *generator) disconnect() {
	for i := range g.connections {
		_ = unix.Close(g.connections[i].fd)
	}
	_ = unix.Close(g.epoll)
}

func (g *generator) send(c *connection, request []byte) error {
	c.sentAt = time.Now()
	c.filled = 0
	n, err := unix.Write(c.fd, request)
	if err == nil && n < len(request) {
		err = io.ErrShortWrite
	}
	if err != nil {
		return fmt.Errorf("sending a request: %w", err)
	}
	return nil
}

var (
	endOfHead     = []byte("\r\n\r\n")
	contentLength = []byte("Content-Length: ")
)

// receive reads what has come, and returns the status of the answer once it is
// complete.
func (c *connection) receive() (status string, err error) {
	n, err := unix.Read(c.fd, c.buffer[c.filled:])
	if err == unix.EAGAIN {
		return "", nil
	}
	if err == nil && n == 0 {
		err = io.ErrUnexpectedEOF
	}
	if err != nil {
		return "", fmt.Errorf("reading an answer after %q: %w", c.buffer[:c.filled], err)
	}
	c.filled += n
	answer := c.buffer[:c.filled]
	head := bytes.Index(answer, endOfHead)
	if head < 0 {
		return "", nil
	}
	length := 0
	if at := bytes.Index(answer[:head], contentLength); at >= 0 {
		for _, digit := range answer[at+len(contentLength) : head+1] {
			if digit < '0' || digit > '9' {
				break
			}
			length = length*10 + int(digit-'0')
		}
	}
	if len(answer) < head+len(endOfHead)+length {
		return "", nil
	}
	return statusText(answer[len("HTTP/1.1 "):][:3]), nil
}

// statusText does not allocate for what is measured.
func statusText(digits []byte) string {
	for _, known := range []string{"200", "429"} {
		if string(digits) == known {
			return known
		}
	}
	return string(digits)
}

// sameRequest is a request that does not change.
func sameRequest(text string) func() []byte {
	request := []byte(text)
	return func() []byte { return request }
}

// freshClients makes requests with a client in X-Forwarded-For that was never
// there before, up to 2^24 of them, in no order.
func freshClients(head string) func() []byte {
	buffer := append([]byte(head), "X-Forwarded-For: "...)
	prefix := len(buffer)
	var n uint32
	return func() []byte {
		mixed := n * 0x9e3779b1 & 0xffffff // odd: each number once
		n++
		buffer = append(buffer[:prefix], "11."...)
		buffer = append(strconv.AppendUint(buffer, uint64(mixed>>16), 10), '.')
		buffer = append(strconv.AppendUint(buffer, uint64(mixed>>8&0xff), 10), '.')
		buffer = append(strconv.AppendUint(buffer, uint64(mixed&0xff), 10), endOfHead...)
		return buffer
	}
}
