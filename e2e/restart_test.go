package e2e

import (
	"net/http"
	"strconv"
	"syscall"
	"testing"
	"time"
)

const bannedSite = `
	edge_limit {
		client connection
		limit strict 2/1d {
			ban 1h
		}
	}
	respond ok`

// A banned client is still banned after a stop and a start, for the time that is
// left; so is one whose server was killed, if it was banned before the last
// minute.
func TestRestart(t *testing.T) {
	needLoopbackNetwork(t)
	t.Parallel()
	addr := freeAddr(t)
	c := startCaddy(t, "", site(addr, bannedSite))
	client := clientFrom(t, "127.0.0.5")
	retryAfter := ban(t, client, addr)

	before := time.Now()
	c.stop(t)
	time.Sleep(1100 * time.Millisecond) // so that the ban is shorter by a second that Retry-After shows
	c.start(t)
	a := get(t, client, "http://"+addr)
	passed := int(time.Since(before).Seconds())
	left, _ := strconv.Atoi(a.header.Get("Retry-After"))
	if a.status != http.StatusTooManyRequests || left >= retryAfter || left < retryAfter-passed-2 {
		t.Errorf("after a restart: %d, Retry-After %d; before it was %d, and %d s passed", a.status, left, retryAfter, passed)
	}
	if a := get(t, clientFrom(t, "127.0.0.6"), "http://"+addr); a.status != http.StatusOK {
		t.Errorf("another client got %d", a.status)
	}
}

func TestKill(t *testing.T) {
	needLoopbackNetwork(t)
	t.Parallel()
	addr := freeAddr(t)
	c := startCaddy(t, "", site(addr, bannedSite))
	client := clientFrom(t, "127.0.0.5")
	ban(t, client, addr)
	time.Sleep(61 * time.Second) // debts are written once a minute
	if err := c.cmd.Process.Signal(syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
	<-c.ended
	c.start(t)
	if a := get(t, client, "http://"+addr); a.status != http.StatusTooManyRequests {
		t.Errorf("a client that was banned more than a minute before the server was killed got %d", a.status)
	}
}

// ban uses up a client's budget and returns its Retry-After.
func ban(t *testing.T, client http.RoundTripper, addr string) (retryAfter int) {
	t.Helper()
	for range 2 {
		if a := get(t, client, "http://"+addr); a.status != http.StatusOK {
			t.Fatalf("status %d within the budget", a.status)
		}
	}
	a := get(t, client, "http://"+addr)
	retryAfter, err := strconv.Atoi(a.header.Get("Retry-After"))
	if a.status != http.StatusTooManyRequests || err != nil {
		t.Fatalf("status %d, Retry-After %q above the budget", a.status, a.header.Get("Retry-After"))
	}
	return retryAfter
}
