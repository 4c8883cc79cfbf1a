package e2e

import (
	"bufio"
	"io"
	"net/http"
	"net/http/httptest"
	"sync"
	"sync/atomic"
	"testing"
	"time"
)

func TestManyStreamsOfOneConnection(t *testing.T) {
	needLoopbackNetwork(t)
	t.Parallel()
	const burst, requests = 100, 1000
	app, addr := startUpstream(t), freeAddr(t)
	startCaddy(t, "", tlsSite(addr, `
		edge_limit {
			client connection
			limit per_client 100/1d
		}
		reverse_proxy `+app.addr))
	conn := connection2(t, "127.0.0.5", addr)
	var passed, denied atomic.Int64
	var all sync.WaitGroup
	for range requests {
		r := request(t, "https://localhost:"+portOf(addr))
		all.Go(func() {
			response, err := conn.RoundTrip(r)
			if err != nil {
				t.Error(err)
				return
			}
			_, _ = io.Copy(io.Discard, response.Body)
			response.Body.Close()
			switch response.StatusCode {
			case http.StatusOK:
				passed.Add(1)
			case http.StatusTooManyRequests:
				denied.Add(1)
			default:
				t.Errorf("status %d", response.StatusCode)
			}
		})
	}
	all.Wait()
	if passed.Load() != burst || denied.Load() != requests-burst || app.requests.Load() != burst {
		t.Errorf("%d passed, %d denied, %d arrived, want exactly %d to pass", passed.Load(), denied.Load(), app.requests.Load(), burst)
	}
}

// One client has one budget, over whatever and however many connections.
func TestOneClientOverSeveralConnections(t *testing.T) {
	needLoopbackNetwork(t)
	t.Parallel()
	app, addr := startUpstream(t), freeAddr(t)
	startCaddy(t, "", tlsSite(addr, `
		edge_limit {
			client connection
			limit per_client 4/h
		}
		reverse_proxy `+app.addr))
	url := "https://localhost:" + portOf(addr)
	connections := []http.RoundTripper{
		clientFrom(t, "127.0.0.5"), clientFrom(t, "127.0.0.5"), // HTTP/1.1, two ports
		connection2(t, "127.0.0.5", addr), connection2(t, "127.0.0.5", addr),
	}
	for n, conn := range connections {
		a := get(t, conn, url)
		a.wantClient(t, "127.0.0.5")
		if want := []string{"HTTP/1.1", "HTTP/2.0"}[n/2]; a.proto != want {
			t.Errorf("connection %d speaks %s, want %s", n, a.proto, want)
		}
	}
	for _, conn := range connections {
		get(t, conn, url).wantDenied(t, time.Hour)
	}
	get(t, connection2(t, "127.0.0.6", addr), url).wantClient(t, "127.0.0.6")
}

// A WebSocket is charged for its handshake, and for nothing that it carries.
func TestWebSocketHandshake(t *testing.T) {
	needLoopbackNetwork(t)
	t.Parallel()
	var told atomic.Value // X-Forwarded-For of the last handshake
	app := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.Header.Get("Upgrade") != "websocket" {
			return
		}
		told.Store(r.Header["X-Forwarded-For"])
		conn, buffered, err := http.NewResponseController(w).Hijack()
		if err != nil {
			t.Error(err)
			return
		}
		defer conn.Close()
		_, _ = io.WriteString(conn, "HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n\r\n")
		_, _ = io.Copy(conn, buffered) // whatever comes, frames or not, goes back
	}))
	t.Cleanup(app.Close)
	addr := freeAddr(t)
	startCaddy(t, "", site(addr, `
		edge_limit {
			client connection
			limit per_client 2/h
		}
		reverse_proxy `+app.Listener.Addr().String()))

	conn, reader := dialRaw(t, "127.0.0.5", addr)
	const handshake = "GET /socket HTTP/1.1\r\nHost: test\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n" +
		"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\nX-Forwarded-For: " + forgedNet + "1.1\r\n\r\n"
	if _, err := io.WriteString(conn, handshake); err != nil {
		t.Fatal(err)
	}
	response, err := http.ReadResponse(reader, nil)
	if err != nil || response.StatusCode != http.StatusSwitchingProtocols {
		t.Fatalf("the handshake: %v, %v", response, err)
	}
	if got, _ := told.Load().([]string); len(got) != 1 || got[0] != "127.0.0.5" {
		t.Errorf("the upstream got X-Forwarded-For %q", got)
	}
	echo := func() {
		t.Helper()
		if _, err := io.WriteString(conn, "hello\n"); err != nil {
			t.Fatal(err)
		}
		if line, err := reader.ReadString('\n'); line != "hello\n" {
			t.Fatalf("the socket answered %q, %v", line, err)
		}
	}
	for range 20 {
		echo()
	}

	client := clientFrom(t, "127.0.0.5")
	if a := get(t, client, "http://"+addr); a.status != http.StatusOK {
		t.Errorf("status %d: the handshake and its messages were charged more than once", a.status)
	}
	get(t, client, "http://"+addr).wantDenied(t, time.Hour)
	echo() // a socket that is open stays open

	denied, deniedReader := dialRaw(t, "127.0.0.5", addr)
	if _, err := io.WriteString(denied, handshake); err != nil {
		t.Fatal(err)
	}
	wantStatus(t, deniedReader, http.StatusTooManyRequests)
}

func wantStatus(t *testing.T, reader *bufio.Reader, want int) {
	t.Helper()
	response, err := http.ReadResponse(reader, nil)
	if err != nil || response.StatusCode != want {
		t.Errorf("got %v, %v, want status %d", response, err, want)
	}
}
