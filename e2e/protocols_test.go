package e2e

import (
	"bufio"
	"context"
	"crypto/tls"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/quic-go/quic-go"
	"github.com/quic-go/quic-go/http3"
)

// http3From is an HTTP/3 client with a local address.
func http3From(t *testing.T, ip string, sessions tls.ClientSessionCache) *http3.Transport {
	t.Helper()
	socket, err := net.ListenUDP("udp4", &net.UDPAddr{IP: net.ParseIP(ip)})
	if err != nil {
		t.Fatal(err)
	}
	transport := &http3.Transport{
		TLSClientConfig: &tls.Config{InsecureSkipVerify: true, ServerName: "localhost", ClientSessionCache: sessions},
		Dial: func(ctx context.Context, addr string, tlsConfig *tls.Config, config *quic.Config) (*quic.Conn, error) {
			to, err := net.ResolveUDPAddr("udp4", addr)
			if err != nil {
				return nil, err
			}
			return quic.DialEarly(ctx, socket, to, tlsConfig, config)
		},
	}
	t.Cleanup(func() {
		transport.Close()
		socket.Close()
	})
	return transport
}

// One client has one budget over all versions of HTTP.
func TestAllVersionsShareOneBudget(t *testing.T) {
	needLoopbackNetwork(t)
	t.Parallel()
	app, addr := startUpstream(t), freeAddr(t)
	startCaddy(t, "", tlsSite(addr, `
		edge_limit {
			client connection
			limit per_client 3/1d
		}
		reverse_proxy `+app.addr))
	url := "https://localhost:" + portOf(addr)
	one, two, three := clientFrom(t, "127.0.0.5"), connection2(t, "127.0.0.5", addr), http3From(t, "127.0.0.5", nil)
	for _, via := range []http.RoundTripper{one, two, three} {
		get(t, via, url, forged(1)[:7]...).wantClient(t, "127.0.0.5")
	}
	for _, via := range []http.RoundTripper{one, two, three} {
		a := get(t, via, url)
		a.wantDenied(t, 24*time.Hour)
		t.Logf("%s: %d", a.proto, a.status)
	}
	get(t, http3From(t, "127.0.0.6", nil), url).wantClient(t, "127.0.0.6")
}

// A PROXY protocol at the listener gives the connection another address, which is
// then the peer.
func TestListenerProxyProtocol(t *testing.T) {
	needLoopbackNetwork(t)
	t.Parallel()
	app, addr := startUpstream(t), freeAddr(t)
	startCaddy(t, `servers {
		listener_wrappers {
			proxy_protocol {
				allow 127.0.0.0/8
			}
		}
	}`, site(addr, `
		edge_limit {
			client connection
			limit per_client 2/1d
		}
		reverse_proxy `+app.addr))
	ask := func(client string) int {
		conn, reader := dialRaw(t, "127.0.0.5", addr)
		defer conn.Close()
		fmt.Fprintf(conn, "PROXY TCP4 %s 192.0.2.1 4711 80\r\nGET / HTTP/1.1\r\nHost: localhost\r\nX-Forwarded-For: 198.18.0.1\r\nConnection: close\r\n\r\n", client)
		response, err := http.ReadResponse(reader, nil)
		if err != nil {
			t.Fatal(err)
		}
		a := answer{status: response.StatusCode, body: readAll(t, response)}
		if a.status == http.StatusOK {
			a.wantClient(t, client)
		}
		return a.status
	}
	for n := range 3 {
		if passes := ask("203.0.113.7") == http.StatusOK; passes != (n < 2) {
			t.Errorf("request %d of one client passes: %v", n, passes)
		}
	}
	if ask("203.0.113.8") != http.StatusOK {
		t.Error("another client behind the same load balancer shares the budget")
	}
}

// An upstream that speaks the PROXY protocol is told the client too.
func TestUpstreamProxyProtocol(t *testing.T) {
	needLoopbackNetwork(t)
	t.Parallel()
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { listener.Close() })
	heads := make(chan string, 10)
	go func() {
		for {
			conn, err := listener.Accept()
			if err != nil {
				return
			}
			go func() {
				defer conn.Close()
				reader := bufio.NewReader(conn)
				head, _ := reader.ReadString('\n')
				r, err := http.ReadRequest(reader)
				if err != nil {
					return
				}
				heads <- head + r.Header.Get("X-Forwarded-For")
				_, _ = io.WriteString(conn, "HTTP/1.1 200 OK\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")
			}()
		}
	}()
	addr := freeAddr(t)
	startCaddy(t, "", site(addr, `
		edge_limit {
			client {
				trusted_proxies static 127.0.0.5
			}
			unresolved deny
		}
		reverse_proxy `+listener.Addr().String()+` {
			transport http {
				proxy_protocol v1
			}
		}`))
	if a := get(t, clientFrom(t, "127.0.0.5"), "http://"+addr, "X-Forwarded-For: 198.18.0.1, 203.0.113.7"); a.status != http.StatusOK {
		t.Fatalf("status %d", a.status)
	}
	if head := <-heads; !strings.HasPrefix(head, "PROXY TCP4 203.0.113.7 ") || !strings.HasSuffix(head, "\n203.0.113.7") {
		t.Errorf("the upstream was told %q", head)
	}
	if a := get(t, clientFrom(t, "127.0.0.5"), "http://"+addr); a.status != http.StatusForbidden {
		t.Errorf("an unresolved client got %d, want 403 rather than an upstream that cannot be dialled", a.status)
	}
}

// A proxy on a Unix socket writes no address of its own, but the chain.
func TestUnixSocketListener(t *testing.T) {
	t.Parallel()
	app := startUpstream(t)
	dir, err := os.MkdirTemp("", "el") // a socket's path must be short
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	trusted, untrusted := filepath.Join(dir, "a"), filepath.Join(dir, "b")
	startCaddy(t, "", fmt.Sprintf(`
http://trusted.test {
	bind unix/%s
	edge_limit {
		client {
			trusted_proxies_unix
		}
		limit trusted 1/1d
	}
	reverse_proxy %s
}
http://untrusted.test {
	bind unix/%s
	edge_limit
	reverse_proxy %s
}`, trusted, app.addr, untrusted, app.addr))
	via := func(socket string) *http.Transport {
		return &http.Transport{DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
			return new(net.Dialer).DialContext(ctx, "unix", socket)
		}}
	}
	get(t, via(trusted), "http://trusted.test", "X-Forwarded-For: 198.18.0.1, 203.0.113.7").wantClient(t, "203.0.113.7")
	get(t, via(trusted), "http://trusted.test", "X-Forwarded-For: 198.18.0.2, 203.0.113.7").wantDenied(t, 24*time.Hour)
	get(t, via(trusted), "http://trusted.test", "X-Forwarded-For: 203.0.113.8").wantClient(t, "203.0.113.8")
	get(t, via(untrusted), "http://untrusted.test", "X-Forwarded-For: 198.18.0.1").wantClient(t, "")
}

// forward_auth asks about a request as it will be: the auth server is told the
// same single client.
func TestForwardAuth(t *testing.T) {
	needLoopbackNetwork(t)
	t.Parallel()
	told := make(chan http.Header, 10)
	auth := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		told <- r.Header
		w.Header().Set("X-User", "alice")
	}))
	t.Cleanup(auth.Close)
	app, addr := startUpstream(t), freeAddr(t)
	startCaddy(t, "", site(addr, `
		edge_limit {
			client {
				trusted_proxies static 127.0.0.5
			}
			limit per_client 2/1d
		}
		forward_auth `+auth.Listener.Addr().String()+` {
			uri /auth
			copy_headers X-User
		}
		reverse_proxy `+app.addr))
	client := clientFrom(t, "127.0.0.5")
	a := get(t, client, "http://"+addr, "X-Forwarded-For: 198.18.0.1, 203.0.113.7", "X-Real-IP: 198.18.0.1")
	a.wantClient(t, "203.0.113.7")
	if user := a.received(t).Header.Get("X-User"); user != "alice" {
		t.Errorf("the upstream got the user %q", user)
	}
	header := <-told
	if got := header["X-Forwarded-For"]; len(got) != 1 || got[0] != "203.0.113.7" || header.Get("X-Real-Ip") != "" {
		t.Errorf("the auth server was told %q and X-Real-IP %q", got, header.Get("X-Real-Ip"))
	}
}

// PHP sees the client as REMOTE_ADDR and in HTTP_X_FORWARDED_FOR, and no
// look-alike that PHP would fold into the same name.
func TestPHP(t *testing.T) {
	needLoopbackNetwork(t)
	t.Parallel()
	fpm := phpFPM(t)
	dir, fastcgi := t.TempDir(), freeAddr(t)
	if err := os.Chmod(dir, 0o755); err != nil {
		t.Fatal(err)
	}
	script := filepath.Join(dir, "index.php")
	write(t, script, `<?php
foreach ($_SERVER as $name => $value) {
	if ($name == 'REMOTE_ADDR' || (str_starts_with($name, 'HTTP_') && $name != 'HTTP_HOST')) echo "$name=$value\n";
}`)
	if err := os.Chmod(script, 0o644); err != nil {
		t.Fatal(err)
	}
	user := ""
	if os.Getuid() == 0 {
		user = "user = www-data\ngroup = www-data"
		if err := os.Chmod(filepath.Dir(dir), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	config := filepath.Join(dir, "fpm.conf")
	write(t, config, fmt.Sprintf("[global]\nerror_log = /dev/stderr\ndaemonize = no\n[www]\n%s\nlisten = %s\npm = static\npm.max_children = 2\n", user, fastcgi))
	p := start(t, nil, fpm, "-F", "-y", config)
	t.Cleanup(func() { p.stop(t) }) // killed, it would leave its children behind
	p.await(t, func() bool { return listens(fastcgi) })

	addr := freeAddr(t)
	startCaddy(t, "", site(addr, `
		root `+dir+`
		edge_limit {
			client {
				trusted_proxies static 127.0.0.5
			}
		}
		php_fastcgi `+fastcgi))
	forgedLines := append([]string{"X-Forwarded-For: 198.18.0.1, 203.0.113.7"}, forged(2)[2:]...)
	body := string(get(t, clientFrom(t, "127.0.0.5"), "http://"+addr+"/index.php", forgedLines...).body)
	for _, want := range []string{"REMOTE_ADDR=203.0.113.7\n", "HTTP_X_FORWARDED_FOR=203.0.113.7\n"} {
		if !strings.Contains(body, want) {
			t.Errorf("PHP did not get %q:\n%s", want, body)
		}
	}
	if strings.Contains(body, forgedNet) {
		t.Errorf("PHP got what the caller forged:\n%s", body)
	}
	// An unresolved client: no address of anybody's.
	body = string(get(t, clientFrom(t, "127.0.0.5"), "http://"+addr+"/index.php", "X-Real-IP: 198.18.0.1").body)
	if strings.Contains(body, forgedNet) || strings.Contains(body, "HTTP_X_FORWARDED_FOR=1") || strings.Contains(body, "HTTP_X_FORWARDED_FOR=2") {
		t.Errorf("for an unresolved client PHP got:\n%s", body)
	}
}

// phpFPM finds a PHP-FPM, whose name holds its version on some systems.
func phpFPM(t *testing.T) string {
	t.Helper()
	for _, pattern := range []string{"/usr/sbin/php-fpm*", "/usr/bin/php-fpm*"} {
		if found, _ := filepath.Glob(pattern); len(found) > 0 {
			return found[len(found)-1]
		}
	}
	missing(t, "php-fpm (on Debian: apt-get install php-fpm)")
	return ""
}
