package redisstore

import (
	"context"
	"fmt"
	"net"
	"os"
	"os/exec"
	"testing"
	"time"

	edgelimit "github.com/edgelimit/caddy-edgelimit"
)

// startRedis runs a Redis until the test ends, and returns its address.
func startRedis(t testing.TB, args ...string) string {
	t.Helper()
	return startServer(t, func(usual []string) []string { return append(append(usual, "--save", ""), args...) })
}

// startServer runs a server with arguments that are made of the usual ones.
func startServer(t testing.TB, with func(usual []string) []string) string {
	t.Helper()
	server, err := exec.LookPath("redis-server")
	if err != nil {
		if os.Getenv("CI") == "true" {
			t.Fatal("missing: redis-server")
		}
		t.Skip("missing: redis-server (on Debian: apt-get install redis-server)")
	}
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	address := listener.Addr().String()
	_, port, _ := net.SplitHostPort(address)
	listener.Close()
	cmd := exec.Command(server, with([]string{"--port", port, "--bind", "127.0.0.1", "--dir", t.TempDir()})...)
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = cmd.Process.Kill()
		_ = cmd.Wait()
	})
	for deadline := time.Now().Add(10 * time.Second); ; time.Sleep(10 * time.Millisecond) {
		if conn, err := net.Dial("tcp", address); err == nil {
			conn.Close()
			return address
		}
		if time.Now().After(deadline) {
			t.Fatal("Redis does not listen")
		}
	}
}

// connect connects to a Redis of its own.
func connect(t *testing.T) *conn {
	t.Helper()
	store := &Store{Address: []string{startRedis(t)}}
	connected, err := store.dial(context.Background())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(connected.Close)
	return connected.(*conn)
}

func keyNumber(kind edgelimit.StoreKind, n int) edgelimit.StoreKey {
	return edgelimit.StoreKey{Kind: kind, Hash: [16]byte{byte(n), byte(n >> 8), 0xed}}
}

// do runs a command, as another program would.
func (c *conn) do(t *testing.T, args ...string) {
	t.Helper()
	if err := c.client.Do(context.Background(), c.client.B().Arbitrary(args[0]).Args(args[1:]...).Build()).Error(); err != nil {
		t.Fatal(fmt.Errorf("%v: %w", args, err))
	}
}

func (c *conn) get(t *testing.T, command, key string) string {
	t.Helper()
	text, err := c.client.Do(context.Background(), c.client.B().Arbitrary(command, key).Build()).ToAny()
	if err != nil {
		return err.Error()
	}
	return fmt.Sprint(text)
}
